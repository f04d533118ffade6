#!/usr/bin/env python
"""The cost of Paddle's layouts of a checkpoint: the time until an update from a folder can be committed, without HTTP.

    python -m benchmarks.layouts                                                          # the embedded model
    python -m benchmarks.layouts --model ~/.cache/fastdeploy-peers/q05 --scratch /dev/shm

The folder, of bfloat16 in one file, is written anew in the layouts of Paddle below ``--scratch``. One runner then reads
all folders in turn. The weights must have the same fingerprint.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.report import json_flag, markdown, write_json
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing.tensors import WEIGHTS, entries, write_safetensors
from fastdeploy.worker.model_runner import ModelRunner

FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "up_gate": ("gate_proj", "up_proj")}
KINDS = ("huggingface", "paddle", "paddle, fused", ".pdparams")


def paddle_tensors(model: Path, fused: bool) -> dict[str, np.ndarray]:
    """Return the tensors of a folder in Paddle's layout, bfloat16 as uint16."""
    raw = (model / WEIGHTS).read_bytes()
    found = {}
    for name, _, shape, start, _ in entries(raw):
        array = np.frombuffer(raw, "<u2", int(np.prod(shape)), start).reshape(shape)
        found[name] = np.ascontiguousarray(array.T) if array.ndim == 2 and "embed_tokens" not in name else array
    for new, parts in FUSED.items() if fused else ():
        for name in [name for name in found if parts[0] in name]:
            together = [found.pop(name.replace(parts[0], part)) for part in parts]
            found[name.replace(parts[0], f"{new}_proj")] = np.concatenate(together, axis=-1)
    return found


def write_paddle(model: Path, folder: Path, kind: str) -> Path:
    """Write a folder again in one of KINDS but the first, and return its path."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["dtype"] = config.pop("torch_dtype")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = paddle_tensors(model, fused=kind == "paddle, fused")
    if kind == ".pdparams":
        with (folder / "model_state.pdparams").open("wb") as file:
            pickle.dump(tensors, file, protocol=4)
        return folder
    write_safetensors(folder / WEIGHTS, tensors)
    return folder


def seconds_to_stage(runner: ModelRunner, folder: Path) -> float:
    """Stage the weights of a folder, and commit them. Return the seconds until they could be committed."""
    started = time.perf_counter()
    staging = runner.begin_update(partial=False)
    staging.add(FolderSource(str(folder)), {})
    staged = staging.finish()
    seconds = time.perf_counter() - started
    assert staged.fingerprint == runner.fingerprint, f"{folder} has other values"
    runner.commit(staged.weights)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--scratch", type=Path, help="for three copies of the model (default: that of the system)")
    parser.add_argument("--repeats", type=int, default=9)
    json_flag(parser)
    args = parser.parse_args(argv)
    runner = ModelRunner(str(args.model), "bfloat16", num_blocks=16, standby_weights="on")
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folders = {KINDS[0]: args.model}
        folders |= {kind: write_paddle(args.model, Path(scratch) / str(i), kind) for i, kind in enumerate(KINDS[1:])}
        for folder in folders.values():  # the first update takes fresh memory
            seconds_to_stage(runner, folder)
        rounds = [{kind: seconds_to_stage(runner, at) for kind, at in folders.items()} for _ in range(args.repeats)]
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        times = [one[kind] for one in rounds]
        ratio = np.median([one[kind] / one[KINDS[0]] for one in rounds])
        rows.append({"layout": kind, "min": min(times), "median": float(np.median(times)), "ratio": float(ratio)})
    cells = [(r["layout"], f"{r['min'] * 1e3:.0f}", f"{r['median'] * 1e3:.0f}", f"{r['ratio']:.2f}") for r in rows]
    print(markdown(("layout", "least, ms", "median, ms", "ratio in a round, median"), cells))
    write_json(args, {"layouts": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
