"""litellm on one of our servers, by its providers "hosted_vllm" and "openai". Run by test_litellm.py in the environment
of the frameworks; prints one line of JSON.

usage: litellm_child.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "12+34="}]
TOO_LONG = "1+" * 4000


def with_provider(provider: str, url: str, model: str) -> dict[str, Any]:
    ask = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    ask |= {"max_tokens": 60, "num_retries": 0}
    whole = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, **ask)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(litellm.completion(messages=MESSAGES, **options, **ask))
    return {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "logprobs": [entry.logprob for entry in whole.choices[0].logprobs.content],
        "streamed": "".join(event.choices[0].delta.content or "" for event in events if event.choices),
        "streamed_tokens": [usage.completion_tokens for event in events if (usage := getattr(event, "usage", None))],
        "too_long": [
            error_of(litellm.completion, messages=[{"role": "user", "content": TOO_LONG}], **ask),
            error_of(litellm.completion, messages=[{"role": "user", "content": TOO_LONG}], stream=True, **ask),
            error_of(litellm.text_completion, prompt=TOO_LONG, **ask),
        ],
        "wrong": error_of(litellm.completion, messages=MESSAGES, **(ask | {"top_p": 7.0})),
        "unknown": error_of(litellm.completion, messages=MESSAGES, **(ask | {"model": f"{provider}/nobody"})),
    }


def error_of(call: Any, **fields: Any) -> list[str]:
    """Return the classes of the error that the call raises, from its own to the most general, without object."""
    try:
        call(**fields)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def main(url: str, model: str) -> dict[str, Any]:
    return {provider: with_provider(provider, url, model) for provider in ("hosted_vllm", "openai")}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
