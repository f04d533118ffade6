"""The plan of memory: a share of the machine's memory is for weights and KV cache together."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.worker import memory_plan
from fastdeploy.worker.memory_plan import MemoryPlan, plan_memory, weight_bytes

GIB = 1 << 30
MACHINE = 64 * GIB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "total_memory", lambda: MACHINE)
    monkeypatch.setattr(memory_plan, "free_memory", lambda: MACHINE - 4 * GIB)


SETTINGS = {"block_size": 16, "num_blocks": None, "kv_cache_bytes": None, "max_model_len": 256,
            "max_num_seqs": 10**9, "engines_on_host": 1, "memory_share": None}  # fmt: skip


def plan(**settings: Any) -> MemoryPlan:
    return plan_memory(load_config(str(MODEL_DIR)), ReferenceOps("float32"), **(SETTINGS | settings))


def model(dtype: str, quantization: str | None = None) -> Model:
    return build_model(load_config(str(MODEL_DIR)), ReferenceOps(dtype), 1, quantization)


def test_the_kv_cache_has_the_share_without_the_weights():
    weights = weight_bytes(model("float32"))
    found = plan(memory_share=0.5)
    assert 0 <= MACHINE / 2 - weights - found.kv_bytes < found.block_bytes
    assert plan().kv_bytes <= 2 * GIB, "without a share the old bound holds"


def test_the_share_is_bounded_by_what_is_free_and_by_what_all_sequences_need():
    assert plan(memory_share=1.0).kv_bytes <= MACHINE - 5 * GIB
    assert plan(memory_share=0.9, max_num_seqs=4).num_blocks == 4 * 256 // 16


def test_the_routing_of_tokens_is_a_part_of_their_blocks(checkpoints):
    config, ops = load_config(str(checkpoints["qwen3_moe"])), ReferenceOps("float32")
    without, kept = (plan_memory(config, ops, **SETTINGS, enable_return_routed_experts=flag) for flag in (False, True))
    assert kept.block_bytes - without.block_bytes == 16 * 2 * 2  # tokens, experts layers, experts of a token


def test_engines_of_one_host_share_the_share():
    one, four = plan(memory_share=0.5), plan(memory_share=0.5, engines_on_host=4)
    assert four.kv_bytes < one.kv_bytes / 3.9


def test_other_settings_of_the_kv_cache_are_stronger():
    assert plan(memory_share=0.5, num_blocks=99).num_blocks == 99
    assert plan(memory_share=0.5, kv_cache_bytes=GIB).kv_bytes <= GIB


def test_a_share_that_the_weights_fill_is_refused_by_name():
    with pytest.raises(InvalidField, match=r"gpu_memory_utilization: the weights, .* leave no memory for a KV cache"):
        plan(memory_share=1e-9)


def test_the_bytes_of_the_weights_are_those_of_the_files():
    size = sum(path.stat().st_size for path in MODEL_DIR.glob("*.safetensors"))
    assert weight_bytes(model("bfloat16")) == pytest.approx(size, rel=0.02)
    assert weight_bytes(model("bfloat16", "int8")) == pytest.approx(1.53 * weight_bytes(model("bfloat16")), rel=0.01)
