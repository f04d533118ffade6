"""A pytest plugin: slime's tests of agents get replies of our server where they start or call a mock of SGLang.

The tokenizers of these tests are made up. Their token ids are folded into the vocabulary of the model that serves, and
the tokens of an answer are those of the test's script (see scripted.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from scripted import folded, post, with_script


async def generated(prompt: list[int], pairs: list[tuple[float, int]], finish: str) -> Any:
    """Return the reply of our server to a request of tokens, with the tokens and the end of the script."""
    wanted = {"max_new_tokens": max(1, len(pairs)), "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": folded(prompt), "sampling_params": wanted, "return_logprob": True}
    reply = await asyncio.to_thread(post, "/generate", body)
    assert len(reply["meta_info"]["output_token_logprobs"]) == wanted["max_new_tokens"]
    script = {"output_token_logprobs": [list(pair) for pair in pairs], "finish_reason": {"type": finish}}
    return with_script(reply, {"meta_info": script})


def pytest_configure() -> None:
    from slime.agent.adapters.common import TurnRecord
    from tests.test_agent import _fakes

    class Served(_fakes.FakeSGLangServer):
        async def _handle(self, request: web.Request) -> web.Response:
            self.routing_keys.append(request.headers.get("X-SMG-Routing-Key"))
            body = await request.json()
            self.requests.append(body)
            return web.json_response(await generated(body["input_ids"], self.turns.pop(0), self.finish_reason))

    def served_call(scripted: list[tuple[str, str, list[float] | None]], tokenizer: Any) -> Any:
        queue = list(scripted)

        async def call(prompt_ids: Any, session: Any, body: Any, *, adapter: Any, session_id: Any = None) -> TurnRecord:
            text, finish, logprobs = queue.pop(0)
            tokens = tokenizer.encode(text)
            pairs = list(zip(logprobs or [0.0] * len(tokens), tokens, strict=True))
            meta = (await generated(list(prompt_ids), pairs, finish))["meta_info"]
            return TurnRecord(
                prompt_ids=list(prompt_ids),
                output_ids=[pair[1] for pair in meta["output_token_logprobs"]],
                finish_reason=meta["finish_reason"]["type"],
                output_log_probs=[pair[0] for pair in meta["output_token_logprobs"]],
            )

        return call

    _fakes.FakeSGLangServer = Served
    _fakes.fake_call_sglang_generate = served_call
