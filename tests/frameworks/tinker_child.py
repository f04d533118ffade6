"""Two Tinker clients learn at the same time, each one token by heart. Run by test_tinker.py in the environment of the
frameworks; prints one line of JSON.

usage: tinker_child.py URL MODEL      (URL: of SkyRL's Tinker server)
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from tinker import types

PROMPT = list(range(40, 60))
TOKENS, SAMPLES, STEPS = 8, 8, 8


def learn(url: str, model: str, token: int) -> list[dict[str, Any]]:
    """Train an adapter to answer ``token``. Return what each policy sampled before the next step, and the last one."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-none")
    trainer = service.create_lora_training_client(base_model=model, rank=8, seed=token)
    target = PROMPT + [token] * TOKENS
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(target[:-1]),
        loss_fn_inputs={"target_tokens": target[1:], "weights": [0.0] * (len(PROMPT) - 1) + [1.0] * TOKENS},
    )
    policies = []
    for step in range(STEPS + 1):
        if step:
            trainer.forward_backward([datum], "cross_entropy").result()
            trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        path = trainer.save_weights_for_sampler(name=f"{step:04d}").result().path
        sampler = service.create_sampling_client(model_path=path)
        params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=step)
        sampled = sampler.sample(types.ModelInput.from_ints(PROMPT), SAMPLES, params).result().sequences
        tokens, logprobs = [s.tokens for s in sampled], [len(s.logprobs or []) for s in sampled]
        policies.append({"path": path, "seed": step, "tokens": tokens, "logprobs": logprobs})
    return policies


def main(url: str, model: str) -> dict[str, Any]:
    with ThreadPoolExecutor(2) as pool:
        futures = {token: pool.submit(learn, url, model, token) for token in (49, 50)}
        learned = {token: future.result() for token, future in futures.items()}
    return {"prompt": PROMPT, "tokens": TOKENS, "samples": SAMPLES, "learned": learned}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
