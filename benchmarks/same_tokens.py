#!/usr/bin/env python
"""Write checksums of the tokens and exact logprobs of fixed prompts, to compare two revisions bit for bit.

    python benchmarks/same_tokens.py before.json
    python benchmarks/same_tokens.py after.json --against before.json
    python benchmarks/same_tokens.py after.json --model ~/.cache/fastdeploy-peers/q05 --against before.json

Runs the embedded model in float32 and bfloat16, and the checkpoint --model in bfloat16: greedy and sampled tokens, and
logprobs of prompts. Checksums of machines with other instruction sets or numbers of cores may differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastdeploy import LLM, SamplingParams

EMBEDDED_PROMPTS, MODEL_PROMPTS = 48, 12
EMBEDDED_VOCAB, BYTE_IDS = 61, 250  # prompts have smaller ids only
MAX_TOKENS = 24


def rows(outputs: Sequence[Any]) -> list[Any]:
    """Return the tokens and logprobs of all choices, each number as hexadecimal digits that lose nothing."""
    return [
        [
            (
                list(choice.token_ids),
                [(one.logprob.hex(), [(token, value.hex()) for token, value in one.top]) for one in choice.entries],
                [one.logprob.hex() for one in output.prompt_entries or []],
                choice.finish_reason,
            )
            for choice in output.outputs
        ]
        for output in outputs
    ]


def checksum(model: str | None, dtype: str, count: int) -> str:
    """Return the sha256 of the results of ``count`` prompts. model: a folder; None: the embedded model."""
    ids, factors = (EMBEDDED_VOCAB, (7, 3)) if model is None else (BYTE_IDS, (977, 31))
    prompts = [[(factors[0] * i * j + factors[1] * i + j) % ids for j in range(1 + i * 17 % 70)] for i in range(count)]
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
    sampled = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.1,
                       seed=i, n=2, logprobs=2, logprobs_mode="processed", ignore_eos=True)
        for i in range(count)
    ]  # fmt: skip
    of_prompts = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    with LLM(model, dtype=dtype, num_gpu_blocks_override=512, max_model_len=512, max_num_seqs=16) as llm:
        results = [
            rows(llm.generate(prompts, greedy)),
            rows(llm.generate(prompts, sampled, first_choice=range(0, 2 * count, 2))),
            rows(llm.generate(prompts[:8], of_prompts)),
        ]
    return hashlib.sha256(json.dumps(results).encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="file to write")
    parser.add_argument("--model", type=Path, help="a checkpoint to run too, e.g. q05")
    parser.add_argument("--against", type=Path, metavar="FILE", help="exit 1 if a checksum differs from this file's")
    args = parser.parse_args(argv)
    before = json.loads(args.against.read_text()) if args.against else None
    found = {f"embedded {dtype}": checksum(None, dtype, EMBEDDED_PROMPTS) for dtype in ("float32", "bfloat16")}
    if args.model:
        found[f"{args.model.name} bfloat16"] = checksum(str(args.model), "bfloat16", MODEL_PROMPTS)
    args.out.write_text(json.dumps(found, indent=1))
    different = [] if before is None else [name for name in found if found[name] != before.get(name)]
    for name, digest in found.items():
        print(f"{name}: {digest}{'  DIFFERENT' if name in different else ''}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
