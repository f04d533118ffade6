"""A trainer's tensors get the names that a server counts."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.state_encoding import HostTensor, host_tensors
from fastdeploy.rl.tensor_names import TensorNames

MLP = "model.layers.0.mlp."
GATE_UP = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
DOWN = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)


def values(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def test_stacked_experts_become_one_tensor_for_each_expert():
    state = {f"{MLP}experts.gate_up_proj": GATE_UP, f"{MLP}experts.down_proj": DOWN}
    found = TensorNames().counted(host_tensors(state))
    expected = {}
    for i in range(2):
        expected[f"{MLP}experts.{i}.gate_proj.weight"], expected[f"{MLP}experts.{i}.up_proj.weight"] = (
            GATE_UP[i, :3],
            GATE_UP[i, 3:],
        )
        expected[f"{MLP}experts.{i}.down_proj.weight"] = DOWN[i]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values(found[name]), array)


def test_a_server_that_stacks_experts_gets_them_as_they_are():
    state = host_tensors({f"{MLP}experts.gate_up_proj": GATE_UP, f"{MLP}experts.gate_up_proj_bias": DOWN[0]})
    assert TensorNames(stacks_experts=True).counted(state) == state


def test_ignored_tensors_are_left_out_and_the_bias_of_ernie_has_its_name_in_a_checkpoint():
    bias = "moe_statics.e_score_correction_bias"
    state = {f"{MLP}gate.{bias}": DOWN[0], "model.layers.1.norm": DOWN[0], "model.layers.11.norm": DOWN[0]}
    found = TensorNames(("model.layers.1.", "model.mtp_")).counted(host_tensors(state))
    assert list(found) == [MLP + bias, "model.layers.11.norm"]


def test_an_expert_that_is_there_twice_is_refused_by_name():
    one = f"{MLP}experts.1.down_proj.weight"
    with pytest.raises(InvalidField, match=one):
        TensorNames().counted(host_tensors({f"{MLP}experts.down_proj": DOWN, one: DOWN[1]}))
