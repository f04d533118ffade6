"""TRL's own synchronous VLLMClient on one of our servers: chat with tools and a template, completions, logprobs of
given tokens. Run by test_trl_client.py in the environment of the frameworks; prints one line of JSON.

usage: trl_child.py URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trl.generation.vllm_client as module

TEMPLATE = (
    "{% for t in tools %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
)


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def main(url: str) -> dict[str, Any]:
    module.is_vllm_available = lambda: True  # read before the first request, and not used later
    client = module.VLLMClient(url)
    messages = [[{"role": "user", "content": "7 + 5"}], [{"role": "user", "content": "8 * 4"}]]
    sampling = {"n": 2, "max_tokens": 6, "temperature": 1.0, "logprobs": 0}
    chats = {
        "plain": client.chat(messages, **sampling),
        "tools": client.chat(messages, tools=[add], **sampling),
        "template": client.chat(messages, tools=[add], chat_template=TEMPLATE, **sampling),
        "null": client.chat(messages, generation_kwargs={"structured_outputs": None}, **sampling),
    }
    prompts = [list(range(40, 60)), list(range(41, 55))]
    completed = client.generate(prompts, n=2, max_tokens=5, generation_kwargs={"structured_outputs": None})
    client.reset_prefix_cache()
    return {
        "model": client.model,
        "world": client.get_world_size(),
        "chats": {name: shape(chat) for name, chat in chats.items()},
        "prompts": {name: ["".join(map(chr, ids)) for ids in chat["prompt_ids"]] for name, chat in chats.items()},
        "completed": shape(completed),
        "echoed": completed["prompt_ids"] == prompts,
    }


def shape(reply: dict[str, Any]) -> list[list[int]]:
    """Return the tokens and logprobs of each completion."""
    pairs = zip(reply["completion_ids"], reply["logprobs"], strict=True)
    return [[len(ids), len(logprobs)] for ids, logprobs in pairs]


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1])), flush=True)
