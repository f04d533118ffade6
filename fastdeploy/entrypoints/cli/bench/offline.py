"""The common part of the measurements of an engine in this process: flags, and a batch of random prompts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy.bench.workload import prompt_ids
from fastdeploy.core.config import EngineConfig, flags_of
from fastdeploy.entrypoints.cli.flags import add_serve_flags, configs
from fastdeploy.entrypoints.cli.settings import SettingsParser

if TYPE_CHECKING:
    from fastdeploy.entrypoints.llm import LLM


def add_engine_flags(parser: SettingsParser) -> None:
    """Add the flags of ``fastdeploy serve``, of which those of the engine count, and ``--output-json``."""
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--disable-detokenize", action="store_true", help=argparse.SUPPRESS)  # costs little
    add_serve_flags(parser)
    parser.take_settings()


def start_engine(args: argparse.Namespace) -> LLM:
    """Return the engine of the flags. Raises InvalidField."""
    from fastdeploy.entrypoints.llm import LLM

    engine, _ = configs(args)
    settings = {field.name: getattr(engine, field.name) for field, _ in flags_of(EngineConfig)}
    return LLM(engine.model, **settings)


def seconds_of_batch(llm: LLM, seed: str, size: int, length: int, output: int, n: int = 1) -> float:
    """Generate for ``size`` random prompts of ``length`` tokens, with ``n`` answers of ``output`` tokens each. Return
    the seconds."""
    from fastdeploy import SamplingParams

    prompts = [prompt_ids(seed, index, length) for index in range(size) for _ in range(n)]
    sampling = SamplingParams(max_tokens=output, temperature=1.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - started


def write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the figures to the file of ``--output-json``."""
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(figures, indent=1) + "\n")
