"""The settings of a run, their checks, and the command line that is made from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from fastdeploy.core.errors import InvalidField

SyncWay = Literal["synchronous", "wait", "abort", "keep", "live"]
KvChoice = Literal["keep", "recompute"]
Dtype = Literal["bfloat16", "float32"]
START_POLICY = Path(__file__).parent / "start_policy"
CHOICES = {"sync": get_args(SyncWay), "kv": get_args(KvChoice), "dtype": get_args(Dtype)}
AT_LEAST = {
    "group": 2, "groups": 1, "concurrency": 1, "max_tokens": 1, "max_staleness": 0, "updates": 1, "warmup": 1,
    "eval_every": 0, "eval_problems": 1, "checkpoint_every": 0, "kl_weight": 0, "seed": 0,
}  # fmt: skip


def option(default: Any, text: str) -> Any:
    """Return a field of Settings with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """One run. Raises InvalidField for a value out of range."""

    out: str = option("runs/async_grpo", "folder of events.jsonl and the checkpoint")
    url: str = option("", "server to use; without it a server is started for the run")
    model: str = option(str(START_POLICY), "checkpoint folder that the server serves at the start")
    dtype: Dtype = option("bfloat16", "dtype of the server")
    seed: int = option(0, "of the problems and the sampling")
    sync: SyncWay = option("live", "how new weights come to the server")
    kv: KvChoice = option("keep", "what happens to the KV of answers in flight")

    target: float = option(0.9, "held-out accuracy at which the run ends; above 1: never")
    minutes: float = option(15.0, "time after which the run ends, evaluation included")
    updates: int = option(100_000, "updates after which the run ends")
    eval_every: int = option(5, "updates between two evaluations; 0: none at all")
    eval_problems: int = option(800, "held-out problems of an evaluation")
    checkpoint_every: int = option(20, "updates between two checkpoints; 0: none at all")
    resume: bool = option(False, "go on from the checkpoint in the folder of the run")

    group: int = option(8, "answers to each problem")
    groups: int = option(24, "groups of an update")
    concurrency: int = option(16, "groups that are generated at the same time")
    max_tokens: int = option(320, "tokens of an answer")
    max_staleness: int = option(4, "publications that a token's weights may lack when it is trained on")

    learning_rate: float = option(2e-4, "of Adam")
    beta2: float = option(0.95, "of Adam")
    warmup: int = option(10, "updates until the learning rate is reached")
    clip_low: float = option(0.2, "the ratio to the sampling policy is clipped to at least 1 minus this")
    clip_high: float = option(0.28, "the ratio is clipped to at most 1 plus this")
    max_ratio: float = option(3.0, "a larger ratio counts as this")
    kl_weight: float = option(0.001, "of the KL divergence to the weights at the start")
    max_grad_norm: float = option(1.0, "the gradient is scaled down to this norm")

    def __post_init__(self) -> None:
        for name, least in AT_LEAST.items():
            self._require(name, getattr(self, name) >= least, f"at least {least}")
        for name in ("minutes", "learning_rate", "clip_low", "clip_high", "max_grad_norm", "target"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name, values in CHOICES.items():
            self._require(name, getattr(self, name) in values, " or ".join(values))
        self._require("max_ratio", self.max_ratio >= 1 + self.clip_high, "at least 1 + clip_high")
        self._require("beta2", 0 <= self.beta2 < 1, "0 to less than 1")

    @cached_property
    def is_mixture(self) -> bool:
        """The model is a Mixture of Experts: the server returns the experts of each token, and the trainer computes
        with these (rollout routing replay)."""
        return "num_experts" in json.loads((Path(self.model) / "config.json").read_text())

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InvalidField(name, f"expected {expected}, got {getattr(self, name)!r}")


def parse(
    argv: list[str] | None = None,
    prog: str = "python -m examples.async_grpo",
    description: str = "Train by asynchronous GRPO.",
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of a command line. defaults: of this program, where they differ from those of Settings. Ends
    the program with a message for a bad one."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    for entry in fields(Settings):
        name, text = "--" + entry.name.replace("_", "-"), entry.metadata["help"]
        default = (defaults or {}).get(entry.name, entry.default)
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true", help=text)
        else:
            parser.add_argument(name, type=type(default), default=default, choices=CHOICES.get(entry.name),
                                help=f"{text} (default: %(default)s)")  # fmt: skip
    try:
        return Settings(**vars(parser.parse_args(argv)))
    except InvalidField as error:
        parser.error(error.message)
