"""adapter_config.json means what it means for PEFT, and a field that is not supported is refused by its name."""

from __future__ import annotations

import signal
import threading

import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.model_executor import lora_config
from fastdeploy.model_executor.lora_config import Modules, read_lora_config
from support.adapters import ALL, shapes_of
from support.specs import SPECS
from support.torch_adapters import config_fields, settings

LINEARS = tuple(sorted(shapes_of(SPECS["qwen3_wide"])))
OTHERS = ("model.embed_tokens", "model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm")
MODULES = Modules(LINEARS, "lm_head", OTHERS)
EXPERTS = [f"experts.{i}" for i in range(4)] + ["shared_experts"]
MIXTURE = Modules(
    (*(f"model.layers.{i}.self_attn.{x}_proj" for x in "qkvo" for i in range(3)),
     *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")), "lm_head"),
    "lm_head",
    ("model.embed_tokens", "model.norm"),
    ("model.layers.1.mlp.gate",
     *(f"model.layers.1.mlp.{one}.{x}_proj" for one in EXPERTS for x in ("gate", "up", "down"))),
)  # fmt: skip
LIST = {"target_modules": list(ALL)}
SUPPORTED = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj", "no_such_module"], "r": 3, "lora_alpha": 7},
    {"target_modules": ["self_attn.q_proj", "1.mlp.up_proj", "model.layers.0.mlp.down_proj"]},
    {"target_modules": ["lm_head"], "lora_alpha": 0},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-Linear", "use_rslora": True, "r": 12, "lora_alpha": 5},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r".*_proj", "exclude_modules": r".*mlp.*"},
    {"target_modules": r"(?i).*\.LAYERS\.1\..*_proj"},
    LIST | {"exclude_modules": ["q_proj", "model.layers.1.mlp.up_proj", "proj"]},
    {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "lm_head"]},
    LIST | {"layers_to_transform": 1},
    LIST | {"layers_to_transform": [0, 2, 9], "layers_pattern": "layers"},
    LIST | {"layers_to_transform": [2], "layers_pattern": ["h", "layers"]},
    LIST | {"layers_to_transform": [1], "layers_pattern": r"lay\w+"},
    LIST | {"layers_to_transform": []},
    LIST | {"layers_to_transform": [0], "layers_pattern": []},
    {"target_modules": ["lm_head", "q_proj", "model.layers.2.mlp.up_proj"], "layers_to_transform": [0]},
    LIST | {"r": 8, "rank_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 3}},
    LIST | {"r": 8, "rank_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 2, r"layers\.[12].*up_proj": 5}},
    LIST | {"r": 8, "rank_pattern": {"model.layers.0.mlp.up_proj": 3, "proj": 6, "_proj": 7, "self_attn.q_proj$": 4}},
    LIST | {"r": 8, "rank_pattern": {"k_proj|up_proj": 2}, "alpha_pattern": {r"mlp\..*": 3, "q_proj": 0}},
    LIST | {"r": 8, "use_rslora": True, "rank_pattern": {"o_proj": 32}, "alpha_pattern": {"^model.layers.0.*": 2.5}},
]


def refusal(config: dict, max_rank: int = 64) -> WeightUpdateRefused:
    with pytest.raises(WeightUpdateRefused) as error:
        read_lora_config(config, MODULES, max_rank)
    return error.value


def nested() -> list:
    """Return lists that are too deep for ``repr``."""
    value: list = []
    for _ in range(5000):
        value = [value]
    return value


def test_modules_ranks_and_scalings_are_those_of_peft(checkpoints, torch_process):
    wanted = torch_process.run(settings, checkpoints["qwen3_wide"], SUPPORTED)
    for config, reference in zip(SUPPORTED, wanted, strict=True):
        found = read_lora_config({"peft_type": "LORA", **config}, MODULES, 64)
        assert reference, config
        assert {name: list(setting) for name, setting in found.items()} == {
            name: list(setting) for name, setting in reference.items()
        }, config


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_proj", "gate_proj"], "experts.0.gate_proj"),
        (["mlp.experts.3.up_proj"], "experts.3.up_proj"),
        (["shared_experts.down_proj"], "shared_experts.down_proj"),
        (r".*\.mlp\.gate", "gate"),
        ("all-linear", "gate"),
    ],
)
def test_adapters_of_experts_and_of_their_router_are_refused_by_name(targets, named):
    with pytest.raises(WeightUpdateRefused) as error:
        read_lora_config({"target_modules": targets}, MIXTURE, 64)
    assert error.value.detail["key"] == "target_modules"
    assert f"model.layers.1.mlp.{named} is targeted: Adapters of experts" in error.value.message
    with pytest.raises(WeightUpdateRefused, match="Adapters of experts"):
        read_lora_config({"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}, MIXTURE, 64)


def test_attention_and_dense_layers_of_a_mixture_may_have_adapters():
    found = read_lora_config({"target_modules": ["v_proj", "layers.0.mlp.up_proj"]}, MIXTURE, 64)
    assert list(found) == [*(f"model.layers.{i}.self_attn.v_proj" for i in range(3)), "model.layers.0.mlp.up_proj"]
    dense = {"target_modules": "all-linear", "exclude_modules": r".*\.layers\.[12]\.mlp\..*"}
    assert len(read_lora_config(dense, MIXTURE, 64)) == 3 * 4 + 3


def test_every_field_that_peft_writes_is_known_and_its_default_accepted(torch_process):
    fields = torch_process.run(config_fields)
    known = lora_config.IGNORED | lora_config.SUPPORTED.keys() | set(lora_config._Fields.__struct_fields__)
    assert known == fields.keys() | {"runtime_config"}
    assert read_lora_config(fields | LIST, MODULES, 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("monteclora_config", {}),
        ("kasa_config", {}),
        ("velora_config", {}),
        ("arrow_config", {"top_k": 2}),
        ("ensure_weight_tying", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "lora_ga"),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("a_field_of_tomorrow", False),
    ],
)
def test_a_field_that_would_change_the_computation_is_refused_by_name(field, value):
    error = refusal(LIST | {field: value})
    assert error.detail["key"] == field and f"{field}: " in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", 8.5),
        ("r", True),
        ("r", "8"),
        ("r", None),
        ("r", 10**30),
        ("lora_alpha", "16"),
        ("lora_alpha", 1e300),
        pytest.param("lora_alpha", 10**400, id="lora_alpha-enormous"),
        ("use_rslora", 1),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": "8"}),
        ("rank_pattern", {"(": 8}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"[": 8}),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", 3),
        ("layers_pattern", "layers"),
        ("exclude_modules", {"q_proj": 1}),
        ("exclude_modules", "("),
        ("target_modules", None),
        ("target_modules", [3]),
        ("target_modules", "("),
        ("target_modules", []),
        ("target_modules", ["no_such_module"]),
        ("target_modules", "q_proj"),  # a regular expression, which matches the whole name
        ("target_modules", ["q_proj", "embed_tokens"]),
        ("target_modules", r".*"),
        ("target_modules", ["input_layernorm"]),
        pytest.param("r", nested(), id="r-nested"),
        pytest.param("a_field_of_tomorrow", nested(), id="unknown-nested"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_the_name_of_its_field(field, value):
    error = refusal(LIST | {field: value})
    assert error.detail["key"] == field and f"{field}: " in error.message


def test_a_config_without_target_modules_is_refused():
    assert refusal({"r": 8}).detail["key"] == "target_modules"


def test_layers_cannot_be_chosen_where_the_target_is_an_expression():
    assert refusal({"target_modules": "all-linear", "layers_to_transform": [0]}).detail["key"] == "layers_to_transform"


def test_an_embedding_as_target_is_refused_by_its_name():
    assert "model.embed_tokens" in refusal({"target_modules": ["q_proj", "embed_tokens"]}).message


@pytest.mark.parametrize(
    ("field", "config"), [("r", {"r": 17}), ("rank_pattern", {"r": 8, "rank_pattern": {"up_proj": 17}})]
)
def test_a_rank_above_the_limit_names_the_field_and_the_flag(field, config):
    error = refusal(LIST | config, max_rank=16)
    assert error.detail["key"] == field and "--max-lora-rank" in error.message and "17" in error.message
    assert read_lora_config(LIST | config, MODULES, 17)


def test_a_rank_that_no_module_has_does_not_count():
    assert read_lora_config(LIST | {"r": 99, "rank_pattern": {".*": 4}}, MODULES, 16)


def test_an_expression_that_takes_for_ever_is_refused_once_and_other_threads_run_meanwhile(monkeypatch):
    config = {"target_modules": r"(.*)*(.*)*(.*)*x"}
    found: list[WeightUpdateRefused] = []
    thread = threading.Thread(target=lambda: found.append(refusal(config)))
    thread.start()
    while thread.is_alive():  # never comes here if the expression runs in this process
        thread.join(0.01)
    assert found[0].detail["key"] == "target_modules" and "regular expression" in found[0].message
    monkeypatch.setattr(lora_config.subprocess, "run", None)
    assert refusal(config).message == found[0].message, "remembered: the second refusal starts no process"


def test_a_refusal_for_which_the_machine_may_be_the_reason_is_not_remembered(monkeypatch):
    """The system may have ended the process since memory was short."""
    config = {"target_modules": r"model\.layers\.0\..*_proj"}
    killed = lora_config.subprocess.CompletedProcess([], -signal.SIGKILL, b"", b"")
    with monkeypatch.context() as patch:
        patch.setattr(lora_config.subprocess, "run", lambda *_, **__: killed)
        assert refusal(config).detail["key"] == "target_modules"
    assert read_lora_config(config, MODULES, 64)


def test_a_config_with_a_list_and_no_patterns_starts_no_process(monkeypatch):
    monkeypatch.setattr(lora_config.subprocess, "run", None)
    assert len(read_lora_config(LIST, MODULES, 64)) == len(LINEARS) - 1


def test_the_answer_of_the_process_does_not_grow_with_the_number_of_expressions(monkeypatch):
    """The server holds the answer in memory, and no step can begin while the answer is parsed."""
    run, sizes = lora_config.subprocess.run, []

    def recorded(*args, **options):
        done = run(*args, **options)
        sizes.append(len(done.stdout))
        return done

    monkeypatch.setattr(lora_config.subprocess, "run", recorded)
    for count in (1, 200):
        found = read_lora_config(LIST | {"rank_pattern": {f"{i}|.*": i + 1 for i in range(count)}}, MODULES, 1)
        assert {setting.rank for setting in found.values()} == {1}
    assert len(sizes) == 2 and sizes[1] < 2 * sizes[0]
