"""Logging of all processes: one line per event, to stderr, with the name of the process. In a fleet the name begins
with that of the replica."""

from __future__ import annotations

import logging

from fastdeploy.core import envs


def setup_logging(process: str) -> logging.Logger:
    """Configure the root logger of this process, and return the logger of this package."""
    process = "/".join(filter(None, (envs.log_name(), process)))
    logging.basicConfig(
        level=envs.log_level().upper(),
        format=f"%(asctime)s %(levelname).1s {process}[%(process)d] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for library in ("httpx", "uvicorn.error"):
        logging.getLogger(library).setLevel(logging.WARNING)
    return logging.getLogger("fastdeploy")
