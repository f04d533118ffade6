"""Train the embedded model by asynchronous GRPO: ``python -m examples.async_grpo --help``."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import nullcontext
from pathlib import Path

import paddle

from examples.async_grpo.config import Settings, parse
from examples.async_grpo.problems import Curriculum
from examples.async_grpo.records import Display
from examples.async_grpo.serving import served
from examples.async_grpo.task import AnswersFailed, Task
from examples.async_grpo.trainer import Trainer
from examples.embedded_model.tokenizer import END_ID
from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.client import RolloutClient
from fastdeploy.testing import ServerFailed

TRAINER_THREADS = 1  # of Paddle: the server has the other core


async def train(settings: Settings, task: Task, url: str, display: Display) -> None:
    """Make the run on the server at ``url``."""
    async with RolloutClient(url, eos_ids=[END_ID]) as client:
        await Trainer(settings, client, task, display).run()


def run(settings: Settings, task: Task) -> int:
    """Make the run, on a server of its own if the settings name none. Returns the exit status of the program."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    paddle.set_device("cpu")
    paddle.set_flags({"FLAGS_use_stride_kernel": False})  # strided views make the backward pass 1.6 times slower
    paddle.base.core.set_num_threads(TRAINER_THREADS)
    out, status = Path(settings.out), 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        own = nullcontext() if settings.url else served(settings, out / "server.log")
        with Display(settings.minutes) as display, own as server:
            asyncio.run(train(settings, task, server.url if server else settings.url, display))
    except* (FastDeployError, AnswersFailed, ServerFailed, OSError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"the run could not go on: {first}", file=sys.stderr)
        status = 1
    except* KeyboardInterrupt:
        status = 130
    return status


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv)
    return run(settings, Curriculum(settings.seed))


if __name__ == "__main__":
    sys.exit(main())
