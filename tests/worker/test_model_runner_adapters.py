"""Adapters at the runner: the tokens are those of transformers and PEFT, whatever else is in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.cpu import CpuOps
from fastdeploy.model_executor.ops.cpu_library import ISA_NAMES
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.worker.model_runner import ModelRunner
from support.adapters import PREFIX, adapter_tensors, cases, simple, write_adapter
from support.runner_ops import with_ops
from support.specs import SPECS, prompt
from support.step_driver import Driver, Sequence, load, sleep, stage, update, wake
from support.torch_adapters import adapted_greedy, adapted_prompt_logprobs

# The linears of DeepSeek's attention have other names; it has a test of its own.
FLOAT32 = [name for name, spec in SPECS.items() if spec.dtype == "float32" and not spec.is_deepseek]
BFLOAT16 = [name for name, spec in SPECS.items() if spec.dtype == "bfloat16"]
KINDS = list(cases(SPECS["qwen2"]))
LENGTHS, STEPS = [1, 17, 70], 24
# As in test_model_runner.py; the adapter rounds the left sides of twice as many products.
BFLOAT16_MAX, BFLOAT16_MEAN = 0.2, 0.03


@pytest.fixture(scope="session")
def adapters(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Write an adapter of each kind for each checkpoint; give their folders by checkpoint and kind."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: {kind: write_adapter(root / name / kind, spec, adapter) for kind, adapter in cases(spec).items()}
        for name, spec in SPECS.items()
        if not spec.is_deepseek
    }


def instruction_sets() -> list[str]:
    """Return the reference, and the instruction sets that the C++ ops can use here."""
    ops = get_ops("float32")
    return ["reference"] + (list(ISA_NAMES[1 : ISA_NAMES.index(ops.isa) + 1]) if isinstance(ops, CpuOps) else [])


ISAS = instruction_sets()


@pytest.fixture(params=ISAS)
def runner_with(request, checkpoints) -> Iterator[Callable[[str], ModelRunner]]:
    """Give a function that makes a runner of a checkpoint. Each test runs with the reference and all instruction
    sets."""
    isa, made = request.param, []

    def make(name: str) -> ModelRunner:
        dtype = SPECS[name].dtype
        ops = ReferenceOps(dtype) if isa == "reference" else get_ops(dtype)
        if isinstance(ops, CpuOps):
            made.append((ops, ops.isa))
            ops.set_isa(isa)
        return ModelRunner(str(checkpoints[name]), num_blocks=400, dtype=dtype, ops=ops)

    yield make
    for ops, before in made:
        ops.set_isa(before)


def _sequence(length: int, served=None, **more) -> Sequence:
    return Sequence(f"p{length}", prompt(length, 211), **({} if served is None else {"served": served}), **more)


@pytest.mark.parametrize(("make_runner", "name"), with_ops(FLOAT32), indirect=["make_runner"])
def test_greedy_ids_and_logprobs_are_those_of_peft_in_one_batch_of_all_kinds(
    name, make_runner, checkpoints, adapters, expected, torch_process
):
    runner = make_runner(name, num_blocks=400)
    served = {kind: load(runner, i + 1, adapters[name][kind]) for i, kind in enumerate(KINDS)}
    sequences = {(kind, n): _sequence(n, served[kind]) for kind in KINDS for n in LENGTHS}
    base = [_sequence(n) for n in (1, 17)]
    Driver(runner).generate([*sequences.values(), *base], STEPS, chunk=32)
    wanted = torch_process.run(adapted_greedy, checkpoints[name], adapters[name], LENGTHS, STEPS)
    for kind in KINDS:
        for n in LENGTHS:
            one, reference = sequences[kind, n], wanted[kind][n]
            assert reference["margin"].min() > 1e-4, f"{kind}: the fixture has a tie: choose another seed"
            assert one.output == reference["ids"].tolist(), kind
            logprobs = np.array([entry.logprob for entry in one.logprobs])
            assert np.abs(logprobs - reference["logprobs"]).max() < 1e-3, kind
        unlike = [n for n in (1, 17) if sequences[kind, n].output != expected[name][n]["ids"][:STEPS].tolist()]
        assert unlike, f"{kind}: the adapter changes no token"
    for one, n in zip(base, (1, 17), strict=True):
        assert one.output == expected[name][n]["ids"][:STEPS].tolist()


@pytest.mark.parametrize(("make_runner", "name"), with_ops(BFLOAT16), indirect=["make_runner"])
def test_bfloat16_logprobs_are_near_peft_in_float32_on_the_same_adapter(
    name, make_runner, checkpoints, adapters, torch_process
):
    """As in test_model_runner.py, along the tokens of PEFT."""
    folder = adapters[name]["rank8"]  # its tensors are bfloat16
    reference = torch_process.run(adapted_greedy, checkpoints[name], {"a": folder}, [70], 48)["a"][70]
    runner = make_runner(name)
    driver, served = Driver(runner), load(runner, 1, folder)
    top20, errors = SamplingParams(temperature=0.0, logprobs=20, max_tokens=64), []
    whole = prompt(70, 211) + reference["ids"].tolist()
    for step in range(0, 48, 2):
        one = Sequence("s", whole[: 70 + step], top20, served=served)
        driver.step([one])
        driver.release(one)
        errors.append(abs(dict(one.logprobs[0].top)[whole[70 + step]] - reference["logprobs"][step]))
        if reference["margin"][step] > 2 * BFLOAT16_MAX:
            assert one.output == [whole[70 + step]]
    assert max(errors) < BFLOAT16_MAX and np.mean(errors) < BFLOAT16_MEAN


# float32 has kernels for two widths of vectors, which the first and the last instruction set choose.
@pytest.mark.parametrize(
    ("runner_with", "name"),
    [
        *((isa, "qwen3_bf16") for isa in ISAS),
        *(pytest.param(isa, "qwen2", marks=[] if isa in (*ISAS[1:2], ISAS[-1]) else pytest.mark.slow) for isa in ISAS),
    ],
    indirect=["runner_with"],
)
def test_bits_do_not_depend_on_the_batch_the_other_adapters_or_the_chunk_size(name, runner_with, adapters):
    runner = runner_with(name)
    kinds = ["rank1", "rank16", "rank_and_alpha_patterns", "only_q_and_v", "output_layer"]
    served = [ServedWeights(), *(load(runner, i + 1, adapters[name][kind]) for i, kind in enumerate(kinds))]
    driver = Driver(runner)

    def sequences() -> list[Sequence]:
        return [_sequence(n, model) for i, model in enumerate(served) for n in (1, 17, 70)]

    alone = [driver.generate([one], 6)[0].trace for one in sequences()]
    for chunk in (7, 50, None):
        together = driver.generate(sequences(), 6, chunk)
        assert [one.trace for one in together] == alone, f"chunk size {chunk}"
    assert len({str(trace) for trace in alone}) == len(alone)


def test_a_request_without_an_adapter_has_the_bits_of_a_runner_without_adapters(make_runner, adapters):
    runner = make_runner("qwen3")
    before = Driver(runner).generate([_sequence(40)], 12)[0].trace
    served = load(runner, 1, adapters["qwen3"]["all_linear"])
    assert Driver(runner).generate([_sequence(40)], 12)[0].trace == before
    beside, _ = Driver(runner).generate([_sequence(40), _sequence(40, served)], 12, chunk=16)
    assert beside.trace == before


@pytest.mark.parametrize("kind", ["rank16", "output_layer"])
def test_prompt_logprobs_are_those_of_peft_however_the_prompt_is_cut(
    kind, make_runner, checkpoints, adapters, torch_process
):
    runner, ids = make_runner("qwen2", num_blocks=200), prompt(311, 211)
    served, other = (load(runner, i, adapters["qwen2"][k]) for i, k in ((5, kind), (2, "rank64")))

    def computed(chunk: int) -> list[float]:
        driver, found = Driver(runner), []
        asks = Sequence("p", ids, SamplingParams(temperature=0.0, prompt_logprobs=0), served=served)
        while asks.computed < len(ids):
            asked = driver.chunk(asks, chunk)
            rows = min(asked.count, len(ids) - 1 - asks.computed)
            beside = [driver.chunk(_sequence(n, model), None) for n, model in ((40, None), (64, other))]
            result = runner.execute(StepPlan(0, [*beside, structs.replace(asked, prompt_logprobs=rows)], []))
            found += [entry.logprob for entry in result.prompt_logprobs.get(2, [])]
            asks.computed += asked.count
        return found

    whole = computed(311)
    assert computed(50) == whole and len(whole) == 310
    wanted = torch_process.run(adapted_prompt_logprobs, checkpoints["qwen2"], adapters["qwen2"][kind], ids)
    np.testing.assert_allclose(whole, wanted, atol=1e-3)


def test_an_adapter_stays_over_an_update_of_the_base_weights(make_runner, adapters, torch_process, tmp_path):
    new = write_checkpoint(tmp_path / "new", replace(SPECS["qwen2"], seed=101))
    runner = make_runner("qwen2")
    served = load(runner, 1, adapters["qwen2"]["output_layer"])
    before = Driver(runner).generate([_sequence(17, served)], STEPS)[0].output
    update(runner, new)
    after = Driver(runner).generate([_sequence(17, served)], STEPS)[0].output
    wanted = torch_process.run(adapted_greedy, new, {"a": adapters["qwen2"]["output_layer"]}, [17], STEPS)
    assert after == wanted["a"][17]["ids"].tolist() and after != before


def test_a_part_of_the_base_weights_that_is_updated_leaves_the_adapter(make_runner, checkpoints, adapters):
    runner = make_runner("qwen3")
    served = load(runner, 1, adapters["qwen3"]["rank8"])
    before = Driver(runner).generate([_sequence(17, served)], 8)[0].trace
    runner.commit(stage(runner, checkpoints["qwen3"], partial=True))
    assert Driver(runner).generate([_sequence(17, served)], 8)[0].trace == before


def test_the_bits_of_an_adapter_stay_over_a_sleep(make_runner, adapters):
    runner = make_runner("qwen3")
    served = load(runner, 1, adapters["qwen3"]["rank8"])
    before = Driver(runner).generate([_sequence(17, served)], 8)[0].trace
    sleep(runner, "weight", "kv_cache")
    wake(runner, "weight", "kv_cache")
    assert Driver(runner).generate([_sequence(17, served)], 8)[0].trace == before


def test_a_plan_that_names_an_unknown_adapter_or_separates_the_chunks_of_one_is_our_mistake(make_runner, adapters):
    runner = make_runner("qwen2")
    served = load(runner, 1, adapters["qwen2"]["rank1"])
    driver = Driver(runner)
    with pytest.raises(KeyError):
        driver.step([_sequence(5, ServedWeights(adapter=2))])
    apart = [driver.chunk(_sequence(n, model), None) for n, model in ((4, served), (5, None), (6, served))]
    with pytest.raises(AssertionError, match="adjacent"):
        runner.execute(StepPlan(0, apart, []))


def test_a_step_with_adapters_can_be_given_up_and_repeated(make_runner, adapters):
    runner = make_runner("qwen2_tied")
    served = load(runner, 1, adapters["qwen2_tied"]["output_layer"])
    driver = Driver(runner)
    undisturbed = driver.generate([_sequence(17, served)], 4)[0].trace
    one = _sequence(17, served)
    for _ in range(4):
        assert runner.execute(StepPlan(0, [driver.chunk(one, None)], []), lambda: True) is None
        driver.step([one])
    assert one.trace == undisturbed


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        ("deepseek", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        ("deepseek_v2", ("q_proj", "kv_a_proj_with_mqa", "o_proj")),
    ],
)
def test_adapters_of_latent_attention_are_those_added_to_the_weights(name, linears, make_runner, tmp_path):
    spec, tensors, steps = SPECS[name], random_tensors(SPECS[name]), 12
    adapter = simple(spec, 4, *linears)
    parts = adapter_tensors(spec, adapter)
    for module in adapter.ranks:  # of rank 4, with lora_alpha 8
        a, b = (parts[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        tensors[module + ".weight"] += 2.0 * b @ a
    merged = Driver(make_runner(write_checkpoint(tmp_path / "merged", spec, tensors)))
    runner = make_runner(name)
    alone = Driver(runner).generate([_sequence(40)], steps)[0]
    served = load(runner, 1, write_adapter(tmp_path / "adapter", spec, adapter))
    adapted, base = Driver(runner).generate([_sequence(40, served), _sequence(40)], steps, chunk=16)
    [wanted] = merged.generate([_sequence(40)], steps)
    assert base.trace == alone.trace and adapted.output == wanted.output != base.output
    logprobs = [[entry.logprob for entry in one.logprobs] for one in (adapted, wanted)]
    np.testing.assert_allclose(*logprobs, atol=1e-4)


def test_an_adapter_of_kv_b_proj_is_refused_by_name(make_runner, tmp_path):
    runner, spec = make_runner("deepseek"), SPECS["deepseek"]
    folder = write_adapter(tmp_path / "adapter", spec, simple(spec, 4, "kv_b_proj"))
    with pytest.raises(WeightUpdateRefused, match="kv_b_proj is targeted: .* kv_b_proj are not supported"):
        load(runner, 1, folder)
