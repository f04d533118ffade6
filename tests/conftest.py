"""Fixtures that many tests share. Everything under ``checkpoints`` is read-only: copy a folder before damaging it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.testing.checkpoints import write_checkpoint
from support import balance, grids, quick, search
from support.specs import SPECS
from support.torch_process import MODES, TorchProcess

pytest_plugins = ("support.http_stack",)

# Each client of httpx reads this file when it is made. The certificates that it reads otherwise take 30 ms, and no test
# calls a server outside of this machine.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "certificate.pem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests without Paddle, processes and servers")
    parser.addoption("--oracles", choices=MODES, default="stored", help="see support/torch_process.py")


def pytest_configure(config: pytest.Config) -> None:
    search.configure()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    if session.config.getoption("quick"):
        quick.forbid()  # not before, since xdist starts processes


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("quick") and quick.left_out(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    grids.mark_the_rest_slow(items)
    if config.getoption("quick"):
        quick.deselect(config, items)
    balance.longest_first(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> balance.ByFile:
    return balance.ByFile(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Event loop of the tests that are marked with anyio."""
    return "asyncio"


@pytest.fixture(scope="session")
def torch_process(pytestconfig: pytest.Config) -> Iterator[TorchProcess]:
    """Give references of torch, stored ones or computed in another process."""
    process = TorchProcess(pytestconfig.getoption("oracles"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write all tiny checkpoints of checkpoints.SPECS; give their folders by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, spec) for name, spec in SPECS.items()}
