"""Reading of adapters: a bad folder is refused by the name of what is wrong, and changes nothing."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.model_executor import lora_config
from fastdeploy.testing.tensors import to_bfloat16
from fastdeploy.worker.model_runner import ModelRunner
from support.adapters import PREFIX, adapter_tensors, cases, config_of, simple, write_adapter
from support.specs import SPECS, prompt
from support.step_driver import Driver, Sequence, load, sleep, wake
from support.torch_adapters import adapted_greedy, save_adapter

SPEC = SPECS["qwen2"]
GOOD = simple(SPEC, 8, seed=3)
Q_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture
def runner(make_runner) -> ModelRunner:
    return make_runner("qwen2")


def refusal(runner: ModelRunner, folder: Path) -> WeightUpdateRefused:
    with pytest.raises(WeightUpdateRefused) as error:
        runner.begin_adapter().read(str(folder))
    return error.value


def output(runner: ModelRunner, served) -> tuple:
    return Driver(runner).generate([Sequence("s", prompt(17, 211), served=served)], 8)[0].trace


def changed(**tensors: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the good tensors with A or B of the first q_proj replaced, or left out."""
    found = adapter_tensors(SPEC, GOOD)
    for key, tensor in tensors.items():
        name = {"a": Q_A, "b": Q_B}[key]
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    return found


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array[-1, -1] = value
    return array


A, B = adapter_tensors(SPEC, GOOD)[Q_A], adapter_tensors(SPEC, GOOD)[Q_B]


@pytest.mark.parametrize(
    ("tensor", "tensors", "why"),
    [
        (Q_A, changed(a=None), "is missing"),
        (Q_B, changed(b=None), "is missing"),
        (Q_A, changed(a=A[:4]), "has shape [4, 64], expected [8, 64]"),
        (Q_B, changed(b=B.T.copy()), "has shape"),
        (Q_B, changed(b=B[:, :, None]), "has shape"),
        (Q_A, changed(a=with_value(A, np.nan)), "not finite"),
        (Q_B, changed(b=with_value(B, np.inf)), "not finite"),
        (Q_A, changed(a=to_bfloat16(with_value(A, -np.inf))), "not finite"),
        (Q_A, changed(a=A.astype(np.int8)), "dtype I8"),
        (f"{PREFIX}lm_head.lora_A.weight", changed() | {f"{PREFIX}lm_head.lora_A.weight": A}, "no module"),
        ("lm_head.weight", changed() | {"lm_head.weight": A}, "no module"),
        (Q_A.replace("lora_A", "lora_A.default"), {Q_A.replace("lora_A", "lora_A.default"): A}, "no module"),
        (f"{PREFIX}lm_head.base_layer.weight", changed() | {f"{PREFIX}lm_head.base_layer.weight": A}, "no module"),
    ],
)
def test_a_bad_tensor_is_refused_by_its_name(runner, tmp_path, tensor, tensors, why):
    error = refusal(runner, write_adapter(tmp_path / "a", SPEC, GOOD, tensors))
    assert error.detail["tensor"] == tensor and why in error.message


def test_a_value_too_large_for_bfloat16_is_refused_by_a_bfloat16_engine_only(make_runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD, changed(b=with_value(B, 3.4e38)))
    assert make_runner("qwen2").begin_adapter().read(str(folder))
    error = refusal(make_runner("qwen2_bf16"), folder)
    assert error.detail["tensor"] == Q_B and "bfloat16" in error.message


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff" * 64, b"[]", b"null", b"[" * 100_000])
def test_a_broken_or_missing_file_is_refused_by_its_name(runner, tmp_path, file, content):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert refusal(runner, folder).detail["file"] == file


def test_a_file_of_tensors_that_is_cut_is_refused(runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for size in (4, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert refusal(runner, folder).detail["file"] == file.name


def test_a_folder_that_is_missing_is_refused(runner, tmp_path):
    assert "missing" in refusal(runner, tmp_path / "missing").message


def test_a_refused_adapter_leaves_the_others_as_they_are(runner, tmp_path):
    served = load(runner, 1, write_adapter(tmp_path / "a", SPEC, GOOD))
    before = output(runner, served)
    refusal(runner, write_adapter(tmp_path / "b", SPEC, GOOD, changed(b=with_value(B, np.nan))))
    assert output(runner, served) == before


def test_the_limit_of_the_rank_is_a_setting_of_the_runner(make_runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    error = refusal(make_runner("qwen2", max_lora_rank=7), folder)
    assert error.detail["key"] == "r" and "--max-lora-rank" in error.message
    assert make_runner("qwen2", max_lora_rank=8).begin_adapter().read(str(folder)).rank == 8


def test_the_info_names_the_largest_rank_and_the_bytes(runner, tmp_path):
    adapter = cases(SPEC)["rank_and_alpha_patterns"]
    staging = runner.begin_adapter()
    info = staging.read(str(write_adapter(tmp_path / "a", SPEC, adapter)))
    size = sum(tensor.nbytes for tensor in adapter_tensors(SPEC, adapter).values())
    assert info.rank == 8 and size <= info.nbytes == staging.finish().nbytes


def test_the_fingerprint_is_of_all_that_the_adapter_computes_with_and_of_nothing_else(runner, tmp_path):
    def found(name: str, tensors: dict | None = None, **config) -> str:
        folder = write_adapter(tmp_path / name, SPEC, GOOD, tensors, config_of(GOOD) | config)
        return runner.begin_adapter().read(str(folder)).fingerprint

    good = found("good")
    assert found("notes", lora_dropout=0.1, base_model_name_or_path="elsewhere") == good
    assert found("copy", adapter_tensors(SPEC, GOOD)) == good
    others = [
        found("one value of A", changed(a=with_value(A, A[-1, -1] + 1))),
        found("one value of B", changed(b=with_value(B, 0.0))),
        found("alpha", lora_alpha=17),
        found("rslora", use_rslora=True),
        found("one alpha", alpha_pattern={"model.layers.0.self_attn.q_proj": 3}),
    ]
    assert len({good, *others}) == 6


def test_the_folder_is_not_needed_after_it_was_read(runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    served = load(runner, 1, folder)
    before = output(runner, served)
    for file in folder.iterdir():
        file.unlink()
    assert output(runner, served) == before


def test_no_memory_for_an_adapter_is_out_of_space(runner, tmp_path, monkeypatch):
    def full(*args):
        raise MemoryError("full")

    monkeypatch.setattr(runner.ops, "pack_lora", full)
    with pytest.raises(OutOfSpace, match="adapter"):
        runner.begin_adapter().read(str(write_adapter(tmp_path / "a", SPEC, GOOD)))


def test_an_adapter_is_moved_to_one_piece_of_memory_before_it_can_be_used(runner, tmp_path, monkeypatch):
    """Steps read it faster from there."""
    gathered: list = []
    monkeypatch.setattr(runner.ops, "gather_adapter", gathered.append)
    staging = runner.begin_adapter()
    staging.read(str(write_adapter(tmp_path / "a", SPEC, GOOD)))
    assert gathered == [staging.finish()]


def test_a_dropped_or_discarded_adapter_is_freed(runner, tmp_path):
    folder = str(write_adapter(tmp_path / "a", SPEC, GOOD))

    def staged():
        staging = runner.begin_adapter()
        staging.read(folder)
        return staging.finish()

    one, other = staged(), staged()
    kept, discarded = weakref.ref(one), weakref.ref(other)
    runner.commit_adapter(1, one)
    runner.discard_adapter(other)
    del one, other
    assert kept() is not None and discarded() is None
    runner.drop_adapters((1, 7))
    assert kept() is None


def test_a_dropped_number_may_be_committed_again(runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    before = output(runner, load(runner, 1, folder))
    runner.drop_adapters([1])
    assert output(runner, load(runner, 1, folder)) == before


@pytest.mark.slow  # torch writes the folder
def test_an_adapter_saved_by_peft_itself_is_the_same_adapter(make_runner, checkpoints, torch_process, tmp_path):
    """PEFT saves the base weights of an output layer that it adapts, too. They are not read."""
    config = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    torch_process.compute(save_adapter, checkpoints["qwen2_tied"], config, tmp_path / "saved")
    wanted = torch_process.compute(adapted_greedy, checkpoints["qwen2_tied"], {"a": tmp_path / "saved"}, [17], 12)
    runner = make_runner("qwen2_tied")
    one = Sequence("s", prompt(17, 211), served=load(runner, 1, tmp_path / "saved"))
    assert Driver(runner).generate([one], 12)[0].output == wanted["a"][17]["ids"].tolist()


def test_fields_of_the_config_reach_the_refusal(runner, tmp_path):
    config = config_of(GOOD) | {"use_dora": True}
    assert refusal(runner, write_adapter(tmp_path / "a", SPEC, GOOD, config=config)).detail["key"] == "use_dora"


def test_without_target_modules_the_modules_of_the_file_are_targeted(runner, tmp_path):
    """SkyRL's JAX trainer writes null."""
    served = load(runner, 1, write_adapter(tmp_path / "a", SPEC, GOOD))
    config = config_of(GOOD) | {"target_modules": None}
    assert output(runner, load(runner, 2, write_adapter(tmp_path / "b", SPEC, GOOD, config=config))) == output(
        runner, served
    )
    assert refusal(runner, write_adapter(tmp_path / "c", SPEC, GOOD, changed(b=None), config)).detail["tensor"] == Q_B
    assert refusal(runner, write_adapter(tmp_path / "d", SPEC, GOOD, {}, config)).detail["key"] == "target_modules"


def test_an_adapter_is_read_and_committed_while_the_weights_sleep(runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    before = output(runner, load(runner, 1, folder))
    sleep(runner, "weight", "kv_cache")
    served = load(runner, 2, folder)
    wake(runner, "weight", "kv_cache")
    assert output(runner, served) == before


def test_a_number_whose_adapter_was_dropped_computes_with_the_adapter_that_is_committed_again(runner, tmp_path):
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    before = output(runner, load(runner, 1, folder))
    assert output(runner, load(runner, 2, folder)) == before
    assert output(runner, load(runner, 3, write_adapter(tmp_path / "b", SPEC, replace(GOOD, seed=9)))) != before
    with pytest.raises(WeightUpdateRefused, match=r"lora_A.*is missing"):
        runner.begin_adapter().read(str(write_adapter(tmp_path / "c", SPEC, GOOD, changed(a=None))))
    runner.drop_adapters([3])
    assert output(runner, load(runner, 3, folder)) == before


def test_the_check_of_a_config_matches_its_expressions_so_that_a_read_starts_no_process(
    make_runner, tmp_path, monkeypatch
):
    """Reads are done one by one, checks beside each other. So the processes belong to the checks."""
    runner = make_runner("qwen2")
    config = config_of(GOOD) | {"target_modules": r".*\.(q|v|k)_proj", "rank_pattern": {"no_such_module": 3}}
    for refused, field in (({"r": 0}, "r"), ({"target_modules": "("}, "target_modules")):
        with pytest.raises(WeightUpdateRefused) as error:
            runner.check_adapter(json.dumps(config | refused).encode())
        assert error.value.detail["key"] == field
    runner.check_adapter(json.dumps(config | {"target_modules": None}).encode())
    runner.check_adapter(json.dumps(config).encode())
    monkeypatch.setattr(lora_config.subprocess, "run", None)
    folder = write_adapter(tmp_path / "a", SPEC, GOOD)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightUpdateRefused, match="adapter_config.json targets its module|belongs to no module"):
        runner.begin_adapter().read(str(folder))
