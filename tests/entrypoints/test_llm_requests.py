"""The offline ``LLM`` as users of FastDeploy call it: forms of prompts, parameters, outputs, streams and chats."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

import fastdeploy
from fastdeploy import LLM, GuidedDecodingParams, SamplingParams
from fastdeploy.client.generation import Generation
from fastdeploy.core import errors
from fastdeploy.core.offline_outputs import CompletionOutput, Completions
from fastdeploy.core.outputs import Logprob as Entry
from fastdeploy.core.sampling_params import SamplingParams as EngineParams
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.offline.requests import conversations_of, prepare, tools_of
from fastdeploy.entrypoints.offline.settings import settings_of
from fastdeploy.entrypoints.offline.views import OutputView
from fastdeploy.inter_communicator.messages import Output
from support.fake_runner import FakeRunner, expected_tokens

VOCAB = 272  # of the embedded model
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(runner=FakeRunner(vocab=VOCAB)) as llm:
        yield llm


def sent(llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> EngineParams:
    """Return the engine's parameters of a request."""
    seen = []
    submit = llm._client.submit

    async def note(add, *rest):
        seen.append(add.sampling)
        return await submit(add, *rest)

    monkeypatch.setattr(llm._client, "submit", note)
    llm.generate([[1, 2]], params)
    return seen[0]


def test_one_prompt_or_many_are_texts_ids_or_dicts(llm):
    ids = llm.tokenizer.encode_now("12+3")
    same = ["12+3", ["12+3"], ids, tuple(ids), [ids], {"prompt": "12+3"}, [{"prompt_token_ids": ids}]]
    outputs = [llm.generate(prompt, GREEDY) for prompt in same]
    assert [len(found) for found in outputs] == [1] * len(same)
    for [output] in outputs:
        assert output.prompt_token_ids == ids
        assert output.outputs.token_ids == expected_tokens(ids, 8, vocab=VOCAB)
    assert [output.prompt for [output] in outputs] == ["12+3", "12+3", ids, ids, ids, "12+3", ids]
    assert llm.generate([], GREEDY) == []
    for prompt in ({"prompt": "a", "multimodal_data": {}}, {}, [{"temperature": 1.0}]):
        with pytest.raises(errors.InvalidField, match="^prompts"):
            llm.generate(prompt, GREEDY)


def test_an_output_is_read_as_fastdeploy_and_as_vllm_name_it(llm):
    params = replace(GREEDY, n=2, logprobs=1, prompt_logprobs=0, seed=2**63 - 1)
    [output] = llm.generate("12+3", params)
    assert output.outputs.text == output.outputs[0].text and output.outputs.index == 0
    assert [choice.index for choice in output.outputs] == [0, 1]
    assert output.finished and output.outputs.finish_reason == "length"
    assert (output.seed, output.error_code, output.error_msg) == (2**63 - 1, 200, None)
    assert output.metrics.model_execute_time > 0 and output.metrics.arrival_time > 1e9
    assert [(span.start, span.end) for span in output.outputs.spans] == [(0, 8)]
    for token, at, logprob in zip(
        output.outputs.token_ids, output.outputs.logprobs, output.outputs.token_logprobs, strict=True
    ):
        assert at[token].logprob == logprob and at[token].decoded_token == llm.tokenizer.token_text(token)
    assert output.prompt_logprobs[0] is None
    assert [list(at) for at in output.prompt_logprobs[1:]] == [[token] for token in output.prompt_token_ids[1:]]
    [without], [again] = (llm.generate("12+3", GREEDY) for _ in range(2))
    assert without.outputs == again.outputs != output.outputs
    assert without.outputs.logprobs is without.outputs.token_logprobs is without.prompt_logprobs is None
    assert without.seed is not None


def test_a_stream_brings_the_same_tokens_and_text_in_pieces(llm):
    prompts, params = ["12+3", "9*9", "1"], [replace(GREEDY, n=2), GREEDY, GREEDY]
    whole = llm.generate(prompts, params)
    texts = [["", ""], [""], [""]]
    ids: list[list[list[int]]] = [[[], []], [[]], [[]]]
    finished = [False] * 3
    for step in llm.generate(prompts, params, stream=True):
        assert len(step) == 3 and any(step)
        for i, output in enumerate(step):
            for choice in output.outputs if output else ():
                assert choice.send_idx == len(ids[i][choice.index]) or not choice.token_ids
                texts[i][choice.index] += choice.text
                ids[i][choice.index] += choice.token_ids
            finished[i] |= output is not None and output.finished
    assert texts == [[choice.text for choice in output.outputs] for output in whole]
    assert ids == [[choice.token_ids for choice in output.outputs] for output in whole]
    assert finished == [True] * 3


def test_a_stream_that_is_left_ends_its_requests_and_an_error_of_it_is_raised(llm):
    steps = llm.generate([[1, 2]], replace(GREEDY, max_tokens=4000), stream=True)
    next(steps)
    llm.pause("keep")
    steps.close()
    while any(llm.is_paused()["counts"].values()):
        pass
    llm.resume()
    with pytest.raises(errors.InvalidField, match="prompts"):
        llm.generate([[1], [9999]], GREEDY, stream=True)
    with pytest.raises(errors.ModelNotFound):
        list(llm.generate([[1]], GREEDY, stream=True, lora_name="nobody"))


def test_a_chat_renders_the_template_with_its_variables(llm):
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]
    given = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "="}}
    [one] = llm.chat(messages, GREEDY, **given)
    assert (one.prompt, one.prompt_token_ids) == ("1+2=", llm.tokenizer.encode_now("1+2="))
    assert one.outputs.token_ids == expected_tokens(one.prompt_token_ids, 8, vocab=VOCAB)
    both = llm.chat([messages, messages[1:]], [GREEDY, replace(GREEDY, logprobs=0)], **given)
    assert [output.prompt for output in both] == ["1+2=", "2="]
    assert both[0].outputs.text == one.outputs.text and both[1].outputs.token_logprobs is not None
    steps = [step for [step] in llm.chat(messages, GREEDY, stream=True, **given)]
    assert "".join(step.outputs.text for step in steps) == one.outputs.text
    [own] = llm.generate({"messages": messages}, GREEDY)
    assert own.prompt_token_ids == llm.chat(messages, GREEDY)[0].prompt_token_ids != one.prompt_token_ids
    for bad in ([], "hello", [["hello"]], [5]):
        with pytest.raises(errors.InvalidField, match="^messages"):
            llm.chat(bad, GREEDY)


def test_a_chat_template_of_the_llm_is_a_text_or_a_file_that_must_be_there(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), file.read_text()):
        with LLM(runner=FakeRunner(vocab=VOCAB), chat_template=given) as llm:
            assert llm.chat([{"role": "user", "content": "1"}], GREEDY)[0].prompt == "1!"
            assert llm.generate({"messages": [{"role": "user", "content": "2"}]}, GREEDY)[0].prompt == "2!"
    with pytest.raises(errors.InvalidField, match="^chat_template"):
        LLM(chat_template=str(tmp_path / "missing.jinja"))


def test_reasoning_and_calls_are_taken_out_of_the_text_of_a_chat(llm):
    answer = '<think>\nhm</think>\n\nOne.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    config = msgspec.structs.replace(llm._context.config, **parsers)
    context = dataclasses.replace(llm._context, config=config)
    [conversation] = conversations_of([{"role": "user", "content": "1"}])
    chat = {"tools": tools_of(tool), "chat_template": TEMPLATE}
    fields = {"lora_name": None}
    prepared = llm._run(prepare(context, conversation, SamplingParams(max_tokens=400), fields, chat))
    for cuts in ([len(answer)], [9, 30, 60, len(answer)]):
        generation = Generation(llm._client, llm.tokenizer, prepared.request, context.pace())
        view = OutputView(context, prepared, generation)
        steps, at = [], 0
        for cut in cuts:
            end = "stop" if cut == len(answer) else None
            output = Output(
                "r", 0, llm.tokenizer.encode_now(answer[at:cut]) + ([257] if end else []), finish_reason=end
            )
            steps.append(view.step([(0, generation.choices[0].feed(output))]).outputs)
            at = cut
        for parts in (steps, [view.whole().outputs]):
            assert "".join(part.text for part in parts) == "One."
            assert "".join(part.reasoning_content or "" for part in parts).strip() == "hm"
            [call] = [call for part in parts for call in part.tool_calls or ()]
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
            assert parts[-1].finish_reason == "tool_calls"


def test_parameters_reach_the_engine_by_their_meaning(llm, monkeypatch):
    params = SamplingParams(
        max_tokens=4, top_k=-1, top_p=0.0, stop_token_ids=[7], bad_words_token_ids=[9, 11], temp_scaled_logprobs=True,
        logprobs=0,
        logits_processors_args={"logit_bias": {3: 1.5, 4: 1e5}}, bad_words=["1"], min_tokens=2, seed=-1,
    )  # fmt: skip
    found = sent(llm, params, monkeypatch)
    assert (found.max_tokens, found.min_tokens, found.stop_token_ids) == (4, 2, (7,))
    assert (found.top_k, found.top_p) == (1, 1.0)
    assert found.logprobs_mode == "temperature" and found.logit_bias == ((3, 1.5), (4, 100.0))
    assert {(9,), (11,)} < set(found.bad_words) and found.seed is not None


def test_without_max_tokens_an_answer_may_fill_the_context(llm, monkeypatch):
    found = sent(llm, SamplingParams(stop_token_ids=list(range(VOCAB))), monkeypatch)
    assert found.max_tokens == llm._context.max_model_len - 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("temperature", -1), ("top_p", -0.1), ("top_k", -2), ("max_tokens", 0), ("min_tokens", -1),
        ("logprobs", -2), ("logprobs", 5000), ("seed", -5), ("min_p", 2),
        ("logits_processors_args", {"logit_bias": 1}), ("stop_token_ids", [-1]), ("logprobs_mode", "some"),
        ("stop", 5), ("stop", ["a", 5]), ("bad_words", "x"), ("bad_words", [5]), ("bad_words_token_ids", 5),
        ("bad_words_token_ids", [1, "x"]), ("reasoning_max_tokens", "x"), ("response_max_tokens", True),
        ("guided_decoding", {"json": {}}), ("logits_processors_args", 5), ("logit_bias", [1]),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused_where_it_is_made_or_changed(llm, field, value):
    with pytest.raises(errors.InvalidField, match=f"^{field}"):
        SamplingParams(**{field: value})
    params = SamplingParams(max_tokens=4)
    setattr(params, field, value)
    with pytest.raises(errors.InvalidField, match=f"^{field}"):
        llm.generate([[1]], params)


def test_guided_decoding_is_one_kind_and_holds(llm):
    with pytest.raises(errors.InvalidField, match="guided_decoding"):
        GuidedDecodingParams(regex="a", choice=["b"])
    with pytest.raises(errors.InvalidField, match="structural_tag"):
        GuidedDecodingParams(structural_tag="{}")
    with pytest.raises(errors.InvalidField, match="regex"):
        llm.generate("1", SamplingParams(guided_decoding=GuidedDecodingParams(regex="(")))


def test_settings_of_fastdeploy_are_taken_changed_or_refused_by_name():
    given = {"max_num_seqs": 4, "swap_space": 9, "tensor_parallel_size": 1, "quantization": "wint8", "tokenizer": None,
             "speculative_config": {"method": "ngram"}, "enable_mm": False,
             "logits_processors": ["LogitBiasLogitsProcessor", "ThinkingBudgetLogitsProcessor"]}  # fmt: skip
    ours = {"max_num_seqs": 4, "quantization": "int8", "enable_speculative_decoding": True}
    assert settings_of(given) == ours
    assert settings_of({"quantization": "None", "load_strategy": "ipc_snapshot"}) == {}
    refused = {"tensor_parallel_size": 2, "splitwise_role": "prefill", "no_such_name": None, "quantization": "wint4",
               "logits_processors": ["mine"], "speculative_config": {"method": "mtp"}, "api_key": "k"}  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(errors.InvalidField, match=f"^{name}"):
            settings_of({name: value})
    with pytest.raises(errors.InvalidField, match="^max_num_seqs"):
        LLM(max_num_seqs="many")
    for model in ("", 5):
        with pytest.raises(errors.InvalidField, match="^model"):
            LLM(model)


def test_names_are_where_fastdeploy_has_them():
    from fastdeploy.engine.request import RequestOutput
    from fastdeploy.engine.sampling_params import SamplingParams as same
    from fastdeploy.entrypoints.llm import LLM as llm_class

    assert same is fastdeploy.SamplingParams and llm_class is fastdeploy.LLM and RequestOutput.__name__
    assert fastdeploy.version() == fastdeploy.__version__ and (MODEL_DIR / "config.json").exists()


def test_choices_without_rank_and_masks_are_read_from_their_bytes():
    entry = Entry(-1.0, 2, *(Entry.of(0, [(5, -0.5)]).top_ids, Entry.of(0, [(5, -0.5)]).top_logprobs), b"\5\0\0\0")
    choice = CompletionOutput(0, [7], entries=[entry])
    assert choice.logprobs == [{7: (-1.0, 2, None), 5: (-0.5, 1, None)}]
    assert choice.sampling_mask == [[5]]
    assert Completions([choice])[0] is choice and Completions([choice]).token_ids == [7]
