"""FastDeploy's flags and variables: each has a verdict, which the parser keeps, and which docs/fastdeploy.md tells."""

from __future__ import annotations

import argparse
import logging

import msgspec
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.fastdeploy_flags import FLAGS, REFUSED_VALUES, VALUES
from fastdeploy.entrypoints.cli.fastdeploy_variables import VARIABLES, take_variables
from fastdeploy.entrypoints.cli.flags import configs, log_without_effect
from fastdeploy.entrypoints.cli.foreign import Foreign, Form, Verdict
from fastdeploy.entrypoints.cli.main import main
from support.command_line import parser
from support.fastdeploy_names import stored
from support.fastdeploy_page import PAGE, flag_rows, variable_rows
from support.markdown import names, tables

BY_NAME = {row.name: row for row in FLAGS}


def parse(*flags: str) -> argparse.Namespace:
    return parser().parse_args(["serve", *flags])


def of_verdict(*verdicts: Verdict) -> list[Foreign]:
    return [row for row in FLAGS if row.verdict in verdicts and row.form is not Form.OURS]


@pytest.mark.parametrize(("kind", "table"), [("flags", FLAGS), ("variables", VARIABLES)])
def test_every_name_of_fastdeploy_has_a_verdict(kind, table):
    lacking = {name: file for name, file in stored(kind).items() if name not in {row.name for row in table}}
    assert not lacking


@pytest.mark.parametrize("table", [FLAGS, VARIABLES])
def test_no_name_is_listed_twice(table):
    assert len({row.name for row in table}) == len(table)


def test_the_tables_of_the_page_are_those_of_the_code():
    told = tables(PAGE)
    page = "PYTHONPATH=. python tests/support/fastdeploy_page.py writes the tables anew"
    assert told["fastdeploy flags"] == flag_rows(), page
    assert told["fastdeploy variables"] == variable_rows(), page


def test_every_route_of_fastdeploy_is_on_the_page():
    told = {name.split()[-1] for row in tables(PAGE)["fastdeploy routes"] for name in names(row[0])}
    assert not {route: file for route, file in stored("routes").items() if route not in told}


def test_every_flag_that_is_said_to_be_the_same_or_to_differ_is_one_of_the_parser():
    options = parse().parser._option_string_actions
    for row in FLAGS:
        assert row.flag in options, row.flag
        assert (options[row.flag].help == argparse.SUPPRESS) == (row.form is not Form.OURS), row.flag


@pytest.mark.parametrize("row", of_verdict(Verdict.NO_EFFECT), ids=lambda row: row.name)
def test_a_flag_without_effect_changes_no_setting_and_is_listed(row):
    args = parse(row.flag, *(["1"] if row.form is Form.TEXT else []))
    assert configs(args) == configs(parse())
    assert args.without_effect == [row.flag]


@pytest.mark.parametrize("row", of_verdict(Verdict.REFUSED), ids=lambda row: row.name)
def test_a_refused_flag_ends_the_command_with_one_line_and_its_harmless_values_change_nothing(row, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", row.flag, *(["other-7"] if row.form is not Form.SWITCH else [])])
    line = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and f"argument {row.flag}: " in line and row.text.replace("`", "") in line
    for value in row.harmless if row.form is not Form.SWITCH else ():
        args = parse(row.flag, value)
        assert configs(args) == configs(parse()) and args.without_effect == []


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--max-concurrency 100", {"max_connections": 100}),
        ("--max-concurrency 100 --workers 3", {"max_connections": 34, "workers": 3}),
        ("--max-concurrency 100 --max-connections 7", {"max_connections": 7}),
        ("--timeout-graceful-shutdown 30", {"shutdown_s": 30.0}),
        ("--timeout-graceful-shutdown 0", {}),
        ("--scheduler-max-size 5", {"max_waiting": 5}),
        ("--scheduler-max-size -1", {}),
        ('--speculative-config {"method":"ngram"}', {"enable_speculative_decoding": True}),
        ('--speculative-config {"method":null}', {"enable_speculative_decoding": False}),
        ('--routing-replay-config {"enable_routing_replay":true,"routing_store_type":"response"}',
         {"enable_return_routed_experts": True}),
        ('--routing-replay-config {"enable_routing_replay":false,"routing_store_type":"local"}', {}),
        ("--routing-replay-config {}", {}),
        ("--routing-replay-config null", {}),
        ("--quantization wint8", {"quantization": "int8"}),
        ('--quantization {"quantization":"wint8"}', {"quantization": "int8"}),
        ("--logprobs-mode processed_logprobs", {"logprobs_mode": "processed"}),
        ("--reasoning-parser ernie-x1", {"reasoning_parser": "ernie45"}),
        ("--tool-call-parser ernie-x1", {"tool_call_parser": "ernie45"}),
        ("--max_model_len 64 --gpu_memory_utilization=0.5", {"max_model_len": 64, "gpu_memory_utilization": 0.5}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--metrics-port 0", {"metrics_port": 0}),
    ],
)  # fmt: skip
def test_a_flag_that_differs_means_what_the_table_says(flags, settings):
    engine, serve = configs(parse(*flags.split()))
    found = msgspec.structs.asdict(engine) | msgspec.structs.asdict(serve)
    plain = [msgspec.structs.asdict(config) for config in configs(parse())]
    assert found == plain[0] | plain[1] | settings


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--max-concurrency many", "argument --max-concurrency: expected a whole number, got 'many'"),
        ('--speculative-config {"method":"mtp"}', "argument --speculative-config: there is no draft model"),
        ("--speculative-config mtp", "argument --speculative-config: expected a JSON object"),
        (
            '--routing-replay-config {"enable_routing_replay":true}',
            "routing_store_type 'local' is not here; use response",
        ),
        ('--routing-replay-config {"enable_routing_replay":true,"routing_store_type":"rdma"}', "'rdma' is not here"),
        ("--routing-replay-config yes", "argument --routing-replay-config: expected a JSON object"),
        ("--quantization wint4", "argument --quantization: wint4 is refused here"),
        ('--quantization {"quantization":"mix_quant"}', "argument --quantization: mix_quant is refused here"),
        ("--logprobs-mode raw_logits", "argument --logprobs-mode: raw_logits is refused here"),
        ("--gpu-memory-utilization 1.5", "argument --gpu-memory-utilization: expected a share from 0 to 1"),
        ("-tp 8", "argument --tensor-parallel-size: '8' is refused here"),
    ],
)
def test_a_value_that_has_no_meaning_here_is_refused(flags, told, capsys):
    with pytest.raises(SystemExit):
        main(["serve", *flags.split()])
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_values_are_those_of_our_flags():
    options = parse().parser._option_string_actions
    for setting, known in VALUES.items():
        assert set(known.values()) <= set(options[BY_NAME[setting].flag].choices)
        assert not set(known) & set(REFUSED_VALUES.get(setting, {}))


def test_a_file_may_have_fastdeploys_flags_with_yamls_types(tmp_path):
    (tmp_path / "fd.yaml").write_text(
        "tensor_parallel_size: 1\ndynamic_load_weight: true\nenable_logprob: false\nmax-concurrency: 9\n"
        "graph_optimization_config: {use_cudagraph: true}\nengine_worker_queue_port: [1, 2]\nscheduler_name: local\n"
    )
    args = parse("--config", str(tmp_path / "fd.yaml"))
    assert args.max_connections == 9
    assert args.sources["max_connections"].endswith("fd.yaml: max-concurrency")
    assert args.without_effect == ["--dynamic-load-weight", "--graph-optimization-config", "--engine-worker-queue-port"]


def test_one_line_of_the_log_lists_what_has_no_effect(caplog):
    caplog.set_level(logging.INFO)
    args = parse("--swap-space", "4", "--kv-cache-ratio", "0.5", "--swap-space", "5")
    args.without_effect += ["FD_TRACE"]
    log_without_effect(args)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("--kv-cache-ratio, --swap-space, FD_TRACE")


def test_variables_of_fastdeploy_are_taken_by_their_verdict():
    environment = {"FD_LOG_LEVEL": "DEBUG", "FD_TRACE": "off", "CUDA_VISIBLE_DEVICES": "0", "FD_PLUGINS": ""}
    assert take_variables(environment) == ["FD_TRACE"]
    assert environment["FASTDEPLOY_LOG_LEVEL"] == "debug"
    environment = {"FD_DEBUG": "1", "FASTDEPLOY_LOG_LEVEL": "error"}
    assert take_variables(environment) == [] and environment["FASTDEPLOY_LOG_LEVEL"] == "error"
    with pytest.raises(InvalidField, match="FD_PLUGINS: .*no code is loaded"):
        take_variables({"FD_PLUGINS": "mine"})


def test_a_variable_of_fastdeploy_that_is_refused_ends_the_command_with_one_line(monkeypatch, capsys):
    monkeypatch.setenv("FD_ENABLE_INTERNAL_ADAPTER", "1")
    with pytest.raises(SystemExit):
        main(["serve"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("fastdeploy serve: error: FD_ENABLE_INTERNAL_ADAPTER: PaddlePaddle/FastDeploy's variable")
