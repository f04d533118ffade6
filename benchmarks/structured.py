"""What structured output costs: tokens per second of many streams with a grammar, relative to the same streams without.

    python -m benchmarks.structured --model FOLDER

The two loads take turns in one engine, and draw the same number of tokens. The model may have random weights: the
grammar's text has a fixed length, so each stream ends at --tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from fastdeploy import LLM, GuidedDecodingParams, SamplingParams

# JSON as long as one likes, with strings, numbers and nesting.
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["add", "multiply", "look up"]},
        "arguments": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind", "arguments"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}


def measure(llm: LLM, sampling: SamplingParams, streams: int) -> tuple[float, float]:
    """Return the tokens of one repeat per second, and per second of CPU time."""
    prompts = [[token + 1 for token in range(k, k + 16)] for k in range(streams)]
    began, cpu_began = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, sampling)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return num_tokens / seconds, num_tokens / cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder; the default is the embedded model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--logprobs", type=int, help="log probabilities of so many of the best tokens")
    parser.add_argument("--logprobs-mode", choices=("raw", "temperature", "processed"), default="raw")
    args = parser.parse_args()
    fields: dict[str, Any] = {"max_tokens": args.tokens, "seed": 1, "logprobs": args.logprobs}
    fields["logprobs_mode"] = args.logprobs_mode
    plain = SamplingParams(**fields, ignore_eos=True)
    with_grammar = SamplingParams(**fields, guided_decoding=GuidedDecodingParams(json=SCHEMA))
    with LLM(args.model, enable_speculative_decoding=False, max_num_seqs=args.streams) as llm:
        for sampling in (plain, with_grammar):
            measure(llm, sampling, args.streams)
        rates = [(measure(llm, plain, args.streams), measure(llm, with_grammar, args.streams))
                 for _ in range(args.repeats)]  # fmt: skip
    names = ("ratio", "cpu_ratio")  # the second one does not depend on other programs on the machine
    ratios = {
        name: statistics.median(constrained[i] / free[i] for free, constrained in rates) for i, name in enumerate(names)
    }
    print(json.dumps({"tokens_per_s_and_cpu_s": rates, **ratios}))


if __name__ == "__main__":
    main()
