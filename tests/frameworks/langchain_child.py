"""langchain-openai on one of our servers. Run by test_langchain.py in the environment of the frameworks; prints one
line of JSON.

usage: langchain_child.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "12+34="


def main(url: str, model: str) -> dict[str, Any]:
    settings = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
    chat = ChatOpenAI(**settings, max_retries=0)
    reply = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    streamed = None
    for chunk in chat.stream(QUESTION, stream_usage=True):
        streamed = chunk if streamed is None else streamed + chunk
    text = OpenAI(**settings, max_retries=0)
    return {
        "text": reply.content,
        "finish": reply.response_metadata["finish_reason"],
        "usage": reply.usage_metadata["output_tokens"],
        "logprobs": [entry["logprob"] for entry in reply.response_metadata["logprobs"]["content"]],
        "streamed": streamed.content,
        "streamed_usage": streamed.usage_metadata["output_tokens"],
        "batch": [reply.content for reply in chat.batch([QUESTION, QUESTION, "7+5="])],
        "completion": text.invoke(QUESTION),
        "completion_streamed": "".join(text.stream(QUESTION)),
        "too_long": error_of(chat.invoke, "1+" * 4000),
        "wrong": error_of(chat.bind(top_p=7.0).invoke, QUESTION),
    }


def error_of(call: Any, *arguments: Any) -> list[str]:
    try:
        call(*arguments)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
