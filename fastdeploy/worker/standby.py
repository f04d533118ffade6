"""The standby copy: packed weights of a runner that do not serve.

New weights are written into its memory, and the weights that they replace become the next standby copy. So an update
takes no fresh pages, which the system provides slowly, and a delta changes a copy of the weights that serve.

Threads: one job at a time works on weights, on the staging thread. The job borrows the copy (``lend``) and returns it
(``give_back``), or its result is committed. ``commit`` and ``drop`` run on the loop's thread, while no such job runs.
A job that hangs is abandoned, and may go on later. So only the last borrower can return memory, and memory that an
abandoned job may still write to is never used again (``LoanGuard``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import paddle

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.interface import DeltaItem, Ops
from fastdeploy.model_executor.parameters import Parameter, Value, as_linear
from fastdeploy.worker.memory import free_memory
from fastdeploy.worker.part_reading import check_given_up

# With "auto", so much memory must stay free beside the standby copy, in bytes.
MARGIN = 1 << 30
# Missed deltas are kept up to this share of a weight's bytes. A copy of the weight is as fast as a larger one.
MISSED_SHARE = 0.25


def allows_copy(policy: str, free: int, nbytes: int) -> bool:
    """Return whether the policy allows a standby copy that needs ``nbytes``, if ``free`` bytes are free."""
    return policy == "on" or (policy == "auto" and free >= nbytes)


class Spare(NamedTuple):
    """A packed weight of the standby copy, which does not serve. missed: the changes of its rows and its bias that
    bring it up to the weight that serves, in order; () = the two are equal, None = the content is stale and must be
    written as a whole."""

    weight: PackedLinear
    missed: tuple[DeltaItem, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + sum(item.payload.nbytes for item in self.missed or ())


class Loan:
    """The standby copy while one job works on it. spares: not used by the job, by parameter key. written: the weights
    that the job writes to. They are not part of ``spares``."""

    def __init__(self, ops: Ops, spares: dict[str, Spare]):
        self._ops = ops
        self.spares = spares
        self.written: dict[str, PackedLinear] = {}

    @property
    def nbytes(self) -> int:
        spares, written = list(self.spares.values()), list(self.written.values())
        return sum(spare.nbytes for spare in spares) + sum(weight.nbytes for weight in written)

    def linear(self, parameter: Parameter) -> PackedLinear:
        """Return memory for new values of a linear: each time the same. The first time, its content is undefined.
        Raises MemoryError."""
        return self._written(parameter)[0]

    def current_linear(self, parameter: Parameter, serving: PackedLinear) -> PackedLinear:
        """Return a weight to change: each time the same. The first time, it equals ``serving``, the value that serves.
        Raises MemoryError."""
        if (weight := self.written.get(parameter.key)) is not None:
            return weight
        weight, missed = self._written(parameter)
        if missed is None:
            self._ops.copy_rows(weight, serving, 0, serving.out_features)
        elif missed:
            self._catch_up(weight, missed, serving)
        return weight

    def _written(self, parameter: Parameter) -> tuple[PackedLinear, tuple[DeltaItem, ...] | None]:
        key = parameter.key
        if (weight := self.written.get(key)) is not None:
            return weight, None
        spare = self.spares.pop(key, None)
        if spare is None:
            spare = Spare(self._ops.new_linear(sum(parameter.rows), parameter.columns, bool(parameter.biases)))
        self.written[key] = spare.weight
        return spare

    def _catch_up(self, weight: PackedLinear, missed: Sequence[DeltaItem], serving: PackedLinear) -> None:
        """Apply the missed deltas of rows. The bias is small and copied as a whole."""
        rows = [item for item in missed if item.region.linear is not None]
        items = [item._replace(region=item.region._replace(linear=weight)) for item in rows]
        results = self._ops.apply_deltas(items, np.zeros(1, np.int32)) if items else []
        assert all(result.problem is None for result in results), results
        if (bias := self._ops.unpack_bias(serving)) is not None:
            self._ops.set_bias(weight, 0, bias)


class StandbyCopy:
    """The standby copy of one runner; see the top of this file.

    policy: "on", "off", or "auto": keep the copy where memory allows. reserve: bytes that the process will still take,
    such as pages of the KV cache. With "auto", the copy is made if its bytes, the reserve and MARGIN are free, and kept
    while MARGIN is free.
    """

    def __init__(
        self,
        ops: Ops,
        parameters: Iterable[Parameter],
        policy: str = "auto",
        reserve: int = 0,
    ):
        self._ops = ops
        self._linears = tuple(parameter for parameter in parameters if not parameter.is_vector)
        self._policy, self._reserve = policy, reserve
        self._spares: dict[str, Spare] = {}
        self._loan: Loan | None = None
        self._expects_deltas = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of the copy, lent or not. Callable on any thread."""
        with self._lock:
            return sum(spare.nbytes for spare in self._spares.values()) + (self._loan.nbytes if self._loan else 0)

    def lend(self, for_delta: bool = False) -> Loan:
        """Lend the copy to a job. An earlier loan that was not returned is void. for_delta: from now on, ``refresh``
        keeps the copy equal to the weights that serve."""
        with self._lock:
            self._expects_deltas |= for_delta
            self._loan = loan = Loan(self._ops, self._spares)
            self._spares = {}
            return loan

    def give_back(self, loan: Loan) -> None:
        """Take the copy back from a job that ended without a commit. What the job wrote is stale. A void loan changes
        nothing."""
        with self._lock:
            if loan is self._loan:
                self._loan = None
                self._spares = self._kept(loan.spares | {key: Spare(weight) for key, weight in loan.written.items()})

    def lose(self, loan: Loan) -> None:
        """Give up the memory of a job that may hang. It is freed when the job drops it."""
        with self._lock:
            if loan is self._loan:
                self._loan = None

    def commit(
        self,
        loan: Loan,
        old: Mapping[str, Value],
        new: Mapping[str, Value],
        missed: Mapping[str, Sequence[DeltaItem]],
    ) -> None:
        """Keep the weights that serve no more. old, new: the values that served, and that serve now, by key. missed:
        the deltas that lie between the two, by key, those of biases included; other old weights are stale."""
        with self._lock:
            unused = loan.spares if loan is self._loan else {}
            spares: dict[str, Spare] = {}
            for key in (parameter.key for parameter in self._linears):
                if key in old and old[key] is not new[key]:
                    spares[key] = _behind(as_linear(old[key]), missed.get(key))
                elif key in unused:
                    spares[key] = unused[key] if key in old else Spare(unused[key].weight)
            self._loan, self._spares = None, self._kept(spares)

    def refresh(self, serving: Mapping[str, Value]) -> None:
        """Make the copy, if there is none and memory allows, and bring it up to the values that serve. Stale weights
        are written only where deltas are expected. Does nothing while the copy is lent. Raises MemoryError."""
        with self._lock:
            if self._loan is not None:
                return
        loan = self.lend()
        try:
            missing = sum(as_linear(serving[p.key]).nbytes for p in self._linears if p.key not in loan.spares)
            may_make = self._allows(missing + self._reserve + MARGIN)
            for parameter in self._linears:
                spare = loan.spares.get(parameter.key)
                wanted = may_make if spare is None else spare.missed or (spare.missed is None and self._expects_deltas)
                if wanted:
                    weight = loan.current_linear(parameter, as_linear(serving[parameter.key]))
                    if as_linear(serving[parameter.key]).quantized and not weight.quantized:
                        self._ops.quantize([weight], np.zeros(1, np.int32))  # takes the pages that an update will need
                    loan.spares[parameter.key] = Spare(weight, ())
                    del loan.written[parameter.key]
        finally:
            self.give_back(loan)

    def drop(self) -> None:
        """Free the copy."""
        with self._lock:
            self._loan, self._spares = None, {}

    def _kept(self, spares: dict[str, Spare]) -> dict[str, Spare]:
        return spares if self._allows(MARGIN) else {}

    def _allows(self, nbytes: int) -> bool:
        """Return whether the policy allows a copy if that takes so much free memory."""
        return allows_copy(self._policy, free_memory(), nbytes)


class LoanGuard:
    """The loan of one update, which another thread may end while the update works or hangs. All methods but ``abandon``
    are called on the thread that stages. for_delta: see ``StandbyCopy.lend``.

    stop: int32 [1], for ``Ops.stage``: 1 once the update was abandoned."""

    def __init__(self, standby: StandbyCopy, for_delta: bool):
        self.stop = np.zeros(1, np.int32)
        self._standby, self._for_delta = standby, for_delta
        self._loan: Loan | None = None
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

    def borrow(self) -> Loan:
        """Return the loan, each time the same. Raises WeightUpdateRefused after ``abandon``."""
        with self._lock:
            check_given_up(self.stop)
            if self._loan is None:
                self._loan = self._standby.lend(self._for_delta)
            return self._loan

    def abandon(self) -> None:
        """Return the loan to the standby copy. If an ``add`` or ``finish`` works, its memory is given up instead,
        because the other thread may still write to it."""
        with self._lock:
            self._failed = True
            self.stop[0] = 1
            loan, self._loan = self._loan, None
            if loan is not None:
                self._standby.lose(loan) if self._working else self._standby.give_back(loan)


def _behind(weight: PackedLinear, missed: Sequence[DeltaItem] | None) -> Spare:
    if missed is None or sum(item.payload.nbytes for item in missed) > MISSED_SHARE * weight.nbytes:
        return Spare(weight)
    return Spare(weight, tuple(missed))
