"""Train the agent by asynchronous GRPO: ``python -m examples.agent_grpo --help``."""

from __future__ import annotations

import logging
import sys

from examples.agent_grpo.start_policy import START_POLICY
from examples.agent_grpo.task import AgentTask
from examples.async_grpo.__main__ import run
from examples.async_grpo.config import parse

DEFAULTS = {
    "out": "runs/agent_grpo", "model": str(START_POLICY), "target": 0.95, "groups": 16, "concurrency": 8,
    "eval_every": 2, "eval_problems": 200,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv, "python -m examples.agent_grpo", "Train an agent by asynchronous GRPO.", DEFAULTS)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # openai's: otherwise each request is a line
    return run(settings, AgentTask(settings.seed))


if __name__ == "__main__":
    sys.exit(main())
