"""The offline class ``LLM``: the same engine without sockets."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.core import errors
from support.fake_runner import FakeRunner, expected_tokens, write_adapter

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(model_dir):
    with LLM(model_dir, runner=FakeRunner(vocab=264)) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = [[k, 7] for k in range(20)]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected_tokens(p, 12, vocab=264) for p in prompts]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_text_prompts_are_tokenised_and_choices_have_text(llm):
    [output] = llm.generate("hello", replace(GREEDY, n=2))
    assert output.prompt_token_ids == llm.tokenizer.encode_now("hello")
    assert len(output.outputs) == 2
    for choice in output.outputs:
        assert choice.text == llm.tokenizer.decode(output.prompt_token_ids + choice.token_ids)[len("hello") :]


def test_a_stop_string_ends_a_choice(llm):
    [whole] = llm.generate("hello", GREEDY)
    stop = next(c for c in whole.outputs[0].text if c.isalnum())
    [output] = llm.generate("hello", replace(GREEDY, stop=[stop]))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == whole.outputs[0].text.split(stop)[0]
    pair = whole.outputs[0].text[1:3]
    [output] = llm.generate("hello", replace(GREEDY, stop=pair))
    assert output.outputs[0].text == whole.outputs[0].text.split(pair)[0], "a string was taken for a list"


def test_each_prompt_may_have_its_own_adapter(llm, tmp_path):
    for name, k in (("a", 3), ("b", 4), ("a", 5)):
        report = llm.load_adapter(name, write_adapter(tmp_path / f"{name}{k}", f"a{k}"))
    assert (report["lora_name"], report["adapter_epoch"], report["replaced"]) == ("a", 2, True)
    outputs = llm.generate([[1], [1], [1]], GREEDY, lora_name=["a", None, "b"])
    for output, k, name in zip(outputs, (5, 0, 4), ("a", "", "b"), strict=True):
        [choice] = output.outputs
        assert choice.token_ids == expected_tokens([1], 12, vocab=264, adapter=k)
        assert [span.adapter for span in choice.spans] == [name]
    assert llm.generate([[1]], GREEDY, lora_name="b")[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert [(adapter["lora_name"], adapter["lora_int_id"]) for adapter in llm.adapters()] == [("a", 1), ("b", 2)]


def test_an_adapter_that_was_unloaded_is_never_the_base(llm, tmp_path):
    llm.load_adapter("a", write_adapter(tmp_path / "a", "a3"))
    with pytest.raises(errors.AdapterLoaded):
        llm.load_adapter("a", write_adapter(tmp_path / "b", "a3"), replace=False)
    llm.unload_adapter("a")
    for call in (lambda: llm.unload_adapter("a"), lambda: llm.generate([[1]], GREEDY, lora_name="a")):
        with pytest.raises(errors.ModelNotFound):
            call()
    for lora_name in (5, ["a", "b"], [["a"]]):
        with pytest.raises(errors.InvalidField, match="lora_name"):
            llm.generate([[1]], GREEDY, lora_name=lora_name)


def test_a_pause_of_one_adapter_leaves_the_engine_running(llm, tmp_path):
    llm.load_adapter("a", write_adapter(tmp_path / "a", "a3"))
    llm.pause("keep", lora_name="a")
    assert llm.is_paused(lora_name="a")["is_paused"] and not llm.is_paused()["is_paused"]
    assert len(llm.generate([[1]], GREEDY)) == 1
    assert llm.resume()["released"] == []
    assert len(llm.resume(lora_name="a")["released"]) == 1


def test_a_bad_prompt_raises_and_leaves_the_engine_working(llm):
    with pytest.raises(errors.InvalidField, match="prompt"):
        llm.generate([[1, 2], [5000]], GREEDY)
    assert len(llm.generate([[1, 2]], GREEDY)) == 1


def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_routes(llm):
    with pytest.raises(errors.ContextLengthExceeded, match="^This model's maximum context length is [0-9]+ tokens"):
        llm.generate([[1] * 100_000], GREEDY)


@pytest.mark.parametrize(
    "prompts", [None, 5, [None], [1.5], [1, "a"], [[]], [""], [[1], [True]], [["a"]], [[-1]], [[2**40]]]
)
def test_a_value_that_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(errors.InvalidField) as info:
        llm.generate(prompts, GREEDY)
    assert info.value.field == "prompts"


def test_bad_sampling_parameters_are_refused_by_name(llm):
    with pytest.raises(errors.InvalidField, match="top_k"):
        llm.generate([[1]], SamplingParams(top_k=2**31))
    with pytest.raises(ValueError, match="sampling_params: got 1 values for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY])
    for n in (0, "2", 5000):
        with pytest.raises(errors.InvalidField, match="^n: "):
            llm.generate([[1]], replace(GREEDY, n=n))


def test_another_thread_can_pause_resume_and_update(llm, tmp_path):
    (tmp_path / "w5").mkdir()
    results: list = []
    held = llm.pause("keep")
    assert held["state"] == "paused" and llm.is_paused()["is_paused"]
    thread = threading.Thread(target=lambda: results.append(llm.generate([[3, 4]], GREEDY)))
    thread.start()
    assert llm.update_weights(str(tmp_path / "w5"), version="five")["version"] == "five"
    assert not results
    llm.resume()
    thread.join(20)
    [output] = results[0]
    assert output.outputs[0].token_ids == expected_tokens([3, 4], 12, weights=5, vocab=264)
    assert [span.version for span in output.outputs[0].spans] == ["five"]


def test_a_control_call_takes_paths_and_refuses_a_value_of_a_wrong_type_by_name(llm, tmp_path):
    with pytest.raises(errors.WeightUpdateRefused, match="not a checkpoint"):
        llm.update_weights(tmp_path)
    for call, field in (
        (lambda: llm.update_weights(5), "model_path"),
        (lambda: llm.update_weights("/tmp", version=5), "version"),
        (lambda: llm.pause(timeout_s="soon"), "timeout_s"),
        (lambda: llm.load_adapter("a", object()), "lora_path"),
    ):
        with pytest.raises(errors.InvalidField) as error:
            call()
        assert error.value.field == field


def test_a_refused_update_raises_and_a_failing_engine_ends_every_wait(llm, tmp_path):
    with pytest.raises(errors.WeightUpdateRefused):
        llm.update_weights(str(tmp_path))
    llm._runner.fail_next = True
    with pytest.raises(errors.EngineError):
        llm.generate([[1, 2]], GREEDY)
    with pytest.raises(errors.EngineError):
        llm.is_paused()


def test_every_wait_ends_when_the_engine_dies_without_answering(llm, monkeypatch):
    monkeypatch.delattr(type(llm._engine), "_end_everything")
    llm._runner.fail_next = True
    with pytest.raises(errors.EngineError):
        llm.generate([[1, 2]], GREEDY)


def test_labels_sleep_reset_and_checksums_work_offline(llm, tmp_path):
    (tmp_path / "w5").mkdir()
    assert llm.update_weights(version="seven")["version"] == llm.weights()["version"] == "seven"
    with pytest.raises(errors.InvalidField, match="model_path"):
        llm.update_weights()
    before = llm.weights(checksums=True)["checksum"]
    assert llm.sleep("kv_cache")["asleep"] == ["kv_cache"] and llm.sleep("weight", discard=True)["freed_bytes"] > 0
    with pytest.raises(errors.WrongOrder):
        llm.update_weights(str(tmp_path / "w5"))
    assert llm.wake_up("weight")["asleep"] == ["kv_cache"] and llm.wake_up()["asleep"] == []
    llm.update_weights(str(tmp_path / "w5"), expected_version="seven")
    assert llm.weights(checksums=True)["checksum"] != before
    llm.pause("keep")
    assert llm.reset("eight")["version"] == "eight" and not llm.is_paused()["is_paused"]
    [output] = llm.generate([[3, 4]], GREEDY)
    assert output.outputs[0].token_ids == expected_tokens([3, 4], 12, weights=5, vocab=264)


def test_a_choice_with_logits_that_are_not_finite_does_not_affect_other_prompts(llm):
    path = expected_tokens([5, 6], 12, vocab=264)
    llm._runner.poison = {path[4]} - set(expected_tokens([3, 4], 12, vocab=264)) - {3, 4, 5, 6}
    assert llm._runner.poison, "the prompts share all their tokens: choose another one"
    bad, good = llm.generate([[5, 6], [3, 4]], GREEDY)
    choice = bad.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("error", errors.NonFiniteLogits.code)
    assert choice.token_ids == path[:5] and "not finite" in choice.message
    assert good.outputs[0].token_ids == expected_tokens([3, 4], 12, vocab=264)


def test_a_field_has_one_value_for_all_prompts_or_one_per_prompt(llm):
    prompts = [[1, 2], [3, 4]]
    sampled = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    single = llm.generate(prompts, sampled, first_choice=7, cache_salt="ab")
    lists = llm.generate(prompts, sampled, first_choice=[7, 7], priority=[1, 0])
    assert [o.outputs[0].token_ids for o in single] == [o.outputs[0].token_ids for o in lists]
    for bad in ({"priority": [1]}, {"deadline_s": -1.0}, {"max_queue_s": "soon"}):
        with pytest.raises(errors.InvalidField) as info:
            llm.generate(prompts, sampled, **bad)
        assert info.value.field == next(iter(bad))


def test_close_ends_a_waiting_generate_and_later_calls_raise(model_dir):
    llm, results = LLM(model_dir, runner=FakeRunner(vocab=264)), []
    llm.pause("keep")
    thread = threading.Thread(target=lambda: results.append(llm.generate([[3, 4]], GREEDY)))
    thread.start()
    while not llm.is_paused()["counts"]["queued"]:
        pass
    llm.close()
    thread.join(20)
    assert [o.outputs[0].finish_reason for o in results[0]] == ["abort"]
    llm.close()
    with pytest.raises(errors.EngineDead):
        llm.is_paused()
