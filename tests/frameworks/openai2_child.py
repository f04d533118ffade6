"""The ``openai`` package of version 2 on one of our servers. Run by test_openai2.py in the environment of the
frameworks; prints one line of JSON.

usage: openai2_child.py URL MODEL KEYED_URL      (KEYED_URL: a server that wants a key, with no room for a request)
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

PROMPT = "12+34="
MESSAGES = [{"role": "user", "content": PROMPT}]


def main(url: str, model: str, keyed_url: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return {
        "version": openai.__version__,
        "models": models(client, model),
        "completions": completions(client, model),
        "chat": chat(client, model),
        "async_chat": asyncio.run(async_chat(url, model)),
        "errors": errors(client, model) | keyed_errors(keyed_url, model),
    }


def models(client: openai.OpenAI, model: str) -> dict[str, Any]:
    listed, one = client.models.list().data, client.models.retrieve(model)
    return {"listed": [entry.id for entry in listed], "retrieved": one.id, "same": one == listed[0]}


def completions(client: openai.OpenAI, model: str) -> dict[str, Any]:
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**ask, logprobs=2)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.completions.create(**ask, **options))
    several = client.completions.create(**(ask | {"prompt": [PROMPT, "7+5="]}), n=2)
    sampled = [client.completions.create(**(ask | {"temperature": 1.5}), n=3, seed=5) for _ in range(2)]
    choice = whole.choices[0]
    return {
        "text": choice.text,
        "finish": choice.finish_reason,
        "tokens": whole.usage.completion_tokens,
        "logprobs": choice.logprobs.token_logprobs,
        "pieces": "".join(choice.logprobs.tokens),
        "streamed": "".join(event.choices[0].text for event in events if event.choices),
        "streamed_tokens": events[-1].usage.completion_tokens,
        "several": {choice.index: choice.text for choice in several.choices},
        "sampled": [[choice.text for choice in reply.choices] for reply in sampled],
    }


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    ask = {"model": model, "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3, n=2)
    with client.chat.completions.stream(**ask, logprobs=True, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    raw = client.chat.completions.with_raw_response.create(**ask)
    return {
        "texts": [choice.message.content for choice in whole.choices],
        "finish": [choice.finish_reason for choice in whole.choices],
        "logprobs": [entry.logprob for entry in whole.choices[0].logprobs.content],
        "tops": [len(entry.top_logprobs) for entry in whole.choices[0].logprobs.content],
        "kinds": sorted(kinds),
        "final": final.choices[0].message.content,
        "final_logprobs": [entry.logprob for entry in final.choices[0].logprobs.content],
        "final_tokens": final.usage.completion_tokens,
        "raw": raw.parse().choices[0].message.content,
    }


async def async_chat(url: str, model: str) -> list[str]:
    """Return the texts of streams that run at once."""

    async def one(client: openai.AsyncOpenAI) -> str:
        ask = {"model": model, "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0}
        stream = await client.chat.completions.create(**ask, stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(one(client) for _ in range(6)))


def errors(client: openai.OpenAI, model: str) -> dict[str, Any]:
    create = client.completions.create
    first = create(model=model, prompt=PROMPT, max_tokens=3000, stream=True, extra_body=same_id())
    next(iter(first))
    try:
        twice = error_of(create, model=model, prompt=PROMPT, extra_body=same_id())
    finally:
        first.close()
    return {
        "field": error_of(create, model=model, prompt=PROMPT, temperature=-1),
        "too_long": error_of(create, model=model, prompt="1+" * 4000),
        "model": error_of(create, model="nobody", prompt=PROMPT),
        "retrieve": error_of(client.models.retrieve, "nobody"),
        "twice": twice,
    }


def same_id() -> dict[str, Any]:
    return {"request_id": "one-and-the-same", "ignore_eos": True}


def keyed_errors(url: str, model: str) -> dict[str, Any]:
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0)
    return {
        "key": error_of(stranger.completions.create, model=model, prompt=PROMPT),
        "full": error_of(client.completions.create, model=model, prompt=PROMPT),
    }


def error_of(call: Any, *arguments: Any, **fields: Any) -> dict[str, Any]:
    try:
        call(*arguments, **fields)
    except openai.APIStatusError as error:
        return {"kind": type(error).__name__, "code": error.code, "param": error.param, "status": error.status_code}
    return {}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
