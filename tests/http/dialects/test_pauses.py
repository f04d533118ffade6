"""The holds that the pause routes of other engines place. These routes have no field for a ttl."""

from __future__ import annotations

import pytest

from fastdeploy.inter_communicator import messages as m
from support.engine_stack import engine_stack, tokens_of
from support.http_calls import answer

PAUSES = ["/pause", "/pause_generation", "/areal_pause_generation"]


@pytest.mark.parametrize("path", PAUSES)
def test_every_hold_has_the_ttl_of_the_server(make_stack, path):
    for settings, ttl_s in (({}, 600.0), ({"dialect_hold_ttl_s": 7.0}, 7.0)):
        stack = make_stack(**settings)
        answer(stack, m.PauseArgs)
        assert stack.http.post(path).status_code == 200
        args = stack.engine.expect(m.PauseArgs).args
        assert (args.ttl_s, args.hold_id) == (ttl_s, None)
        stack.close()


def test_the_server_runs_again_after_a_trainer_has_died_in_a_pause(model_dir, tokenizer):
    with engine_stack(model_dir, tokenizer, dialect_hold_ttl_s=0.2) as server:
        for path in PAUSES:
            report = server.http.post(path).json()["report"]
            assert report["is_paused"] and report["hold"]["ttl_left_s"] <= 0.2
            body = {
                "prompt": [1, 2, 3],
                "max_tokens": 4,
                "ignore_eos": True,
                "return_token_ids": True,
                "temperature": 0,
            }
            choice = server.post("/v1/completions", **body).json()["choices"][0]
            assert choice["token_ids"] == tokens_of([1, 2, 3], 4), "held until the hold ended"
            assert not server.http.get("/is_paused").json()["holds"]
