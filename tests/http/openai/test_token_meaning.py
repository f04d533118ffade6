"""Weight versions and logprobs in replies, and fields that are refused because they would change the tokens."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.http.body import IGNORED
from fastdeploy.http.openai.protocol import UNSUPPORTED
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import replace, reply_with
from support.http_calls import events

CHAT = {"messages": [{"role": "user", "content": "a"}]}
ROUTES = [("/v1/completions", {"prompt": [1, 2, 3]}), ("/v1/chat/completions", CHAT)]
OLD, NEW, RENAMED = ("v1", 1), ("v2", 2), ("v2b", 2)


def choices_of(stream) -> list[dict]:
    *payloads, end = events(stream)
    assert end == "[DONE]"
    return [payload["choices"][0] for payload in payloads]


def labelled(tokens: list[int], *labels: tuple[str, int]):
    """Return a script with one output per token. Token i of choice k has the label i + k, or the last label."""

    def script(add: AddRequest) -> list[m.Output]:
        outputs = []
        for i, token in enumerate(tokens):
            for choice in range(add.n):
                version, weight_epoch = labels[min(i + choice, len(labels) - 1)]
                last = i == len(tokens) - 1
                output = m.Output(add.request_id, choice, [token], [], [Span(version, weight_epoch, i, i + 1)])
                outputs.append(replace(output, finish_reason="length" if last else None, num_preempted=int(last)))
        return outputs

    return script


def versions(choice: dict) -> tuple:
    spans = [(s["version"], s["weight_epoch"], s["start"], s["end"]) for s in choice["weight_versions"]]
    return spans, choice["min_weight_version"], choice["max_weight_version"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_choice_tells_its_own_weight_versions_and_their_bounds(stack, path, body):
    """Known failure 22: only the first of n choices was labelled."""
    stack.script(labelled([97, 98, 99, 100], OLD, OLD, NEW))
    expected = [
        ([("v1", 1, 0, 2), ("v2", 2, 2, 4)], "v1", "v2"),
        ([("v1", 1, 0, 1), ("v2", 2, 1, 4)], "v1", "v2"),
        ([("v2", 2, 0, 4)], "v2", "v2"),
    ]
    reply = stack.post(path, **body, n=3).json()
    assert [versions(choice) for choice in reply["choices"]] == expected
    assert [choice["num_preempted"] for choice in reply["choices"]] == [1, 1, 1]
    streamed: dict[int, list] = {0: [], 1: [], 2: []}
    for choice in choices_of(stack.post(path, **body, n=3, stream=True)):
        (span,) = choice["weight_versions"]
        streamed[choice["index"]].append((span["version"], span["start"], span["end"]))
        assert ("min_weight_version" in choice) == (choice["finish_reason"] is not None)
        if choice["finish_reason"] is not None:
            bounds = expected[choice["index"]][1:]
            assert (choice["min_weight_version"], choice["max_weight_version"]) == bounds
    assert streamed[1] == [("v1", 0, 1), ("v2", 1, 2), ("v2", 2, 3), ("v2", 3, 4)]
    assert streamed[2] == [("v2", i, i + 1) for i in range(4)]


NUMBERED = [*ROUTES, ("/inference/v1/generate", {"token_ids": [1, 2, 3]})]


@pytest.mark.parametrize(("path", "body"), NUMBERED)
def test_the_weight_version_of_a_reply_is_the_number_of_its_oldest_weights(stack, path, body):
    """rLLM reads int(reply["weight_version"]), and counts how old the sample is."""
    stack.script(labelled([97, 98], ("10", 1), ("9", 2)))
    assert stack.post(path, **body).json()["weight_version"] == 10
    *payloads, _ = events(stack.post(path, **body, stream=True))
    assert [payload["weight_version"] for payload in payloads] == [10, 9]


@pytest.mark.parametrize("label", ["step-41", "", "٤٢", "4" * 19, "-1", "1.5"])
def test_a_label_that_is_no_number_gives_no_weight_version(stack, label):
    stack.script(labelled([97], (label, 7)))
    assert stack.post("/v1/completions", prompt=[1]).json()["weight_version"] is None


def test_a_label_that_changes_within_a_weight_epoch_makes_two_spans_and_bounds_go_by_time(stack):
    stack.script(labelled([97, 98, 99], ("later", 2), RENAMED))
    choice = stack.post("/v1/completions", prompt=[1]).json()["choices"][0]
    assert versions(choice) == ([("later", 2, 0, 1), ("v2b", 2, 1, 3)], "later", "v2b")


def test_bounds_go_by_weight_epoch_and_not_by_the_order_of_labels(stack):
    stack.script(labelled([97, 98], ("step-9", 1), ("step-10", 2)))
    choice = stack.post("/v1/completions", prompt=[1]).json()["choices"][0]
    assert versions(choice)[1:] == ("step-9", "step-10")


def test_a_stop_string_cuts_weight_versions_with_the_tokens(stack):
    stack.script(labelled(list(b"ab.cd"), OLD, OLD, OLD, NEW))
    for choice in stack.post("/v1/completions", prompt=[1], stop=".", return_token_ids=True).json()["choices"]:
        assert choice["token_ids"] == list(b"ab.") and versions(choice) == ([("v1", 1, 0, 3)], "v1", "v1")


def test_a_choice_without_tokens_has_no_versions(stack):
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort", message="Abort before prefill")])
    choice = stack.post("/v1/completions", prompt=[1]).json()["choices"][0]
    assert versions(choice) == ([], None, None)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_logprobs_mode_is_that_of_the_server_unless_the_request_has_one(make_stack, path, body):
    stack = make_stack(logprobs_mode="temperature")
    stack.script(reply_with([97]))
    for named, expected in ((None, "temperature"), ("raw", "raw"), ("processed", "processed")):
        assert stack.post(path, **body, logprobs_mode=named).status_code == 200
        assert stack.engine.expect(AddRequest).sampling.logprobs_mode == expected


def with_prompt_logprobs(entries: list[Logprob]):
    def script(add: AddRequest) -> list[m.Output]:
        return [
            replace(out, prompt_logprobs=entries if i == 0 else [])
            for i, out in enumerate(reply_with([97, 98], step=1)(add))
        ]

    return script


ENTRIES = [Logprob.of(-1.5, ((9, -0.25), (2, -1.5)), 2), Logprob.of(-7.0, ((8, -0.5), (9, -0.75)), 41)]
SHAPED = [None, {"2": -1.5, "9": -0.25}, {"3": -7.0, "8": -0.5, "9": -0.75}]


def shape(entries: list) -> list:
    return [entry and {token: value["logprob"] for token, value in entry.items()} for entry in entries]


def test_the_first_choice_of_a_prompt_has_prompt_logprobs_in_vllms_shape(stack):
    stack.script(with_prompt_logprobs(ENTRIES))
    body = {"prompt": [1, 2, 3], "n": 2, "prompt_logprobs": 2}
    first, second = stack.post("/v1/completions", **body).json()["choices"]
    assert stack.engine.expect(AddRequest).sampling.prompt_logprobs == 2
    assert shape(first["prompt_logprobs"]) == SHAPED and "prompt_logprobs" not in second
    assert list(first["prompt_logprobs"][1]) == ["2", "9"], "the prompt's own token comes first"
    assert [entry["rank"] for entry in first["prompt_logprobs"][1].values()] == [2, 1]
    ranks = [entry["rank"] for entry in first["prompt_logprobs"][2].values()]
    assert ranks == [41, 1, 2], "the prompt's token has a rank, also if it is not among the best"
    streamed = choices_of(stack.post("/v1/completions", **body, stream=True))
    assert [shape(c["prompt_logprobs"]) for c in streamed if "prompt_logprobs" in c] == [SHAPED]


def test_a_chat_has_prompt_logprobs_beside_its_choices(stack):
    stack.script(with_prompt_logprobs(ENTRIES))
    reply = stack.post("/v1/chat/completions", **CHAT, prompt_logprobs=0).json()
    assert len(reply["prompt_logprobs"]) == 3 and "prompt_logprobs" not in reply["choices"][0]
    assert "prompt_logprobs" not in stack.post("/v1/chat/completions", **CHAT).json()


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
def test_after_an_abort_within_the_prompt_prompt_logprobs_are_null_on_every_route(stack, known, streams):
    """Known failure 52: a client reads them by position in the prompt."""
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort", prompt_logprobs=ENTRIES[:known])])

    def bodies(path: str, **body: object) -> list[dict]:
        reply = stack.post(path, **body)
        return events(reply)[:-1] if streams else [reply.json()]

    asked = {"prompt_logprobs": 1, "stream": streams}
    text = bodies("/v1/completions", prompt=[1, 2, 3], **asked)[0]
    assert text["choices"][0]["prompt_logprobs"] is None
    chat = bodies("/v1/chat/completions", **CHAT, **asked)[0]
    assert (chat["choices"][0] if streams else chat)["prompt_logprobs"] is None
    of_sglang = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "stream": streams}
    (sglang,) = bodies("/generate", input_ids=[1, 2, 3], **of_sglang)
    assert sglang["meta_info"]["input_token_logprobs"] == sglang["meta_info"]["input_top_logprobs"] == []
    if not streams:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"prompt_logprobs": 1}}
        (vllm,) = bodies("/inference/v1/generate", **body)
        assert vllm["prompt_logprobs"] is None


def test_a_prompt_of_one_token_has_its_one_entry_also_after_an_abort(stack):
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort")])
    choice = stack.post("/v1/completions", prompt=[1], prompt_logprobs=1).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]


def test_prompt_logprobs_of_a_whole_body_are_bounded(stack):
    """Each of them takes up to 100 bytes of the reply."""
    stack.script(reply_with([97]))
    fitting, too_many = [[1] * 120] * 68, [[1] * 120] * 69  # 68 x 120 x 257 is just below 2^21
    assert stack.post("/v1/completions", prompt=fitting, prompt_logprobs=256).status_code == 200
    assert stack.engine.expect(AddRequest).sampling.prompt_logprobs == 256
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 256}
    for path, body, field in (
        ("/v1/completions", {"prompt": too_many, "prompt_logprobs": 256}, "prompt_logprobs"),
        ("/generate", {"input_ids": too_many, **asked}, "top_logprobs_num"),
        ("/generate", {"input_ids": [1], **asked, "top_logprobs_num": 1025}, "top_logprobs_num"),
    ):
        error = stack.post(path, **body).json()["error"]
        assert error["param"] == field and ("2097152" in error["message"] or "1024" in error["message"])


@pytest.mark.parametrize(("path", "body"), NUMBERED)
def test_without_detokenize_no_text_is_made_and_no_stop_string_can_be_found(stack, path, body):
    """As in vLLM. On its own route the field is a sampling parameter."""
    asked = {"detokenize": False, "stop": "x"}

    def post(*fields: str):
        more = {field: asked[field] for field in fields}
        return stack.post(path, **body, **({"sampling_params": more} if "token_ids" in body else more))

    stack.script(reply_with([97, 98]))
    reply = post("detokenize")
    choice = reply.json()["choices"][0]
    assert reply.status_code == 200 and choice.get("text", choice.get("message", {}).get("content", "")) == ""
    assert reply.json()["usage"]["completion_tokens"] == 2 and choice["weight_versions"][0]["end"] == 2
    refused = post("detokenize", "stop")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")
    assert post("stop").status_code == 200


def test_a_resubmission_keeps_its_seed_and_choice_and_its_text_includes_the_earlier_tokens(stack):
    stack.script(reply_with(list(b"you")))
    body = {"prompt": [1, *b"hey "], "resumed_tokens": 4, "first_choice": 2, "seed": 5, "return_token_ids": True}
    choice = stack.post("/v1/completions", **body).json()["choices"][0]
    assert choice["text"] == "hey you" and choice["token_ids"] == list(b"you")
    add = stack.engine.expect(AddRequest)
    assert (add.resumed_tokens, add.first_choice, add.sampling.seed) == (4, 2, 5)
    assert add.prompt_token_ids == [1, *b"hey "]


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_a_field_that_would_change_the_tokens_is_refused_unless_its_value_is_neutral(module_stack, field):
    """Known failure 34: an unsupported field was ignored, and the data changed."""
    module_stack.script(reply_with([97]))
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        reply = module_stack.post(path, **body, **{field: {"not": "neutral"}})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field
        for neutral in UNSUPPORTED[field]:
            assert module_stack.post(path, **body, **{field: neutral}).status_code == 200, (field, neutral)


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_bookkeeping_fields_and_hints_are_accepted_and_dropped(module_stack, field):
    module_stack.script(reply_with([97]))
    for path, body in ROUTES:
        assert module_stack.post(path, **body, **{field: True}).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "image_embeds"])
def test_content_that_is_not_text_is_refused(module_stack, kind):
    """Known failure 34."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}, "text": "b"}]}
    reply = module_stack.post("/v1/chat/completions", messages=[message])
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages.0.content.1"
