"""The end of an update of weights from another thread, while the update works or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import paddle

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.worker.standby import Loan, StandbyCopy
from fastdeploy.worker.tensor_reading import check_given_up


class StagingGuard:
    """Guards the loan of one update. All methods but ``abandon`` are called on the thread that stages.

    stop: int32 [1], for ``Ops.stage``: 1 once the update was abandoned. loan: None before ``borrow`` and after
    ``abandon``."""

    def __init__(self, standby: StandbyCopy):
        self.stop = np.zeros(1, np.int32)
        self.loan: Loan | None = None
        self._standby = standby
        self._working = self._failed = False
        self._lock = threading.Lock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Surround one ``add`` or ``finish``. Raises WeightUpdateRefused if an earlier one has failed, and OutOfSpace
        in place of a MemoryError."""
        with self._lock:
            if self._failed:
                raise WeightUpdateRefused("a part of this update was refused: begin again")
            self._working = True
        try:
            with paddle.no_grad():
                yield
        except MemoryError as error:
            self._failed = True
            raise OutOfSpace(f"no memory for the new weights: {error}") from error
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._lock:
                self._working = False

    def borrow(self, for_delta: bool = False, prepare: Callable[[Loan], None] = lambda loan: None) -> Loan:
        """Return the loan, each time the same. prepare: called with a new loan; what it takes from the runner is not
        taken after ``abandon``. Raises WeightUpdateRefused after ``abandon``."""
        with self._lock:
            check_given_up(self.stop)
            if self.loan is None:
                self.loan = self._standby.lend(for_delta)
                prepare(self.loan)
            return self.loan

    def abandon(self) -> None:
        """Return the loan to the standby copy. If an ``add`` or ``finish`` works, its memory is given up instead,
        because the other thread may still write to it."""
        with self._lock:
            self._failed = True
            self.stop[0] = 1
            loan, self.loan = self.loan, None
            if loan is not None:
                self._standby.lose(loan) if self._working else self._standby.give_back(loan)
