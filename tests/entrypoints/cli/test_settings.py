"""Settings come from a file, the environment and flags, each stronger than the one before."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fastdeploy.entrypoints.cli.flags import NO_SETTINGS, configs
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.entrypoints.cli.settings import misspelt_variables, settings_of
from support.command_line import parser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def parse(*flags: str) -> argparse.Namespace:
    return parser().parse_args(["serve", *flags])


def error_of(capsys: pytest.CaptureFixture[str], *flags: str, command: str = "serve") -> str:
    """Return the last line of a command that is refused."""
    with pytest.raises(SystemExit) as caught:
        main([command, *flags])
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_flag_beats_the_environment_which_beats_the_file(file, monkeypatch):
    file.write_text("port: 1\nworkers: 2\nmax-num-seqs: 3\n")
    monkeypatch.setenv("FASTDEPLOY_WORKERS", "4")
    monkeypatch.setenv("FASTDEPLOY_MAX_NUM_SEQS", "5")
    args = parse("--max-num-seqs", "6", "--config", str(file))
    assert (args.port, args.workers, args.max_num_seqs, args.block_size) == (1, 4, 6, 16)
    found = {setting.name: setting.source for setting in settings_of(args)}
    assert found["port"] == f"{file}: port"
    assert (found["workers"], found["max_num_seqs"]) == ("FASTDEPLOY_WORKERS", "--max-num-seqs")
    assert found["block_size"] == "default"


def test_a_flag_with_the_value_of_the_default_beats_the_file(file):
    file.write_text("port: 1\nenable_prefix_caching: false\n")
    args = parse("--config", str(file), "--port", "8180", "--enable-prefix-caching")
    assert (args.port, args.enable_prefix_caching) == (8180, True)


def test_each_type_of_setting_is_read_from_a_file(file):
    file.write_text(
        "insecure-control: true\nenable_prefix_caching: no\nallowed_hosts: [a, b]\nmodel_root: [/x, /y]\n"
        "standby_weights: off\nkv_cache_gb: 2\nstall_s: 5\nspill_dir: /tmp\ntrace: null\nserved_model_name: '7'\n"
    )
    engine, serve = configs(parse("--config", str(file)))
    assert (serve.insecure_control, engine.enable_prefix_caching) == (True, False)
    assert (serve.allowed_hosts, engine.model_roots) == (("a", "b"), ("/x", "/y"))
    assert (engine.standby_weights, engine.kv_cache_gb, serve.stall_s) == ("off", 2.0, 5.0)
    assert (engine.spill_dir, engine.trace, serve.served_model_name) == ("/tmp", "", "7")


def test_each_type_of_setting_is_read_from_the_environment(monkeypatch):
    given = {"insecure_control": "1", "enable_prefix_caching": "off", "allowed_hosts": "a, b", "model_root": "/x,/y"}
    for name, value in (given | {"kv_cache_gb": "2", "port": ""}).items():
        monkeypatch.setenv(f"FASTDEPLOY_{name.upper()}", value)
    engine, serve = configs(parse())
    assert (serve.insecure_control, engine.enable_prefix_caching) == (True, False)
    assert (serve.allowed_hosts, engine.model_roots) == (("a", "b"), ("/x", "/y"))
    assert (engine.kv_cache_gb, serve.port) == (2.0, 8180)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_num_seq: 1", "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("max_num_seqs: many", "max_num_seqs: expected a whole number, got 'many'"),
        ("max_num_seqs: 1.5", "max_num_seqs: expected a whole number, got 1.5"),
        ("max_num_seqs: true", "max_num_seqs: expected a whole number, got True"),
        ("max_num_seqs: [1]", "max_num_seqs: expected one value, got [1]"),
        ("max_num_seqs: 0", "max_num_seqs: expected a number above 0, got 0"),
        ("insecure_control: 3", "insecure_control: expected true or false, got 3"),
        ("dtype: int3", "dtype: expected one of auto, float32, bfloat16, got 'int3'"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("insecure-control: false\ninsecure_control: true", "line 2: insecure_control stands there twice"),
        ("served-model-name: 010", "expected text in quotes, got 8"),
        ("api-key: 0123456", "api-key: expected text in quotes, got a value"),
        ("tensor_parallel_size: 2", "tensor_parallel_size: '2' is refused here: an engine computes on one CPU"),
        ("quantization: wint4", "quantization: wint4 is refused here"),
        ("- port", "expected settings with names, got list"),
        ("a: b: c", "line 1: expected YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_key(file, capsys, text, told):
    file.write_text(text)
    error = error_of(capsys, "--config", str(file))
    assert str(file) in error and told in error


def test_a_file_that_is_not_there_is_refused(capsys, monkeypatch):
    assert "argument --config: expected a YAML file, got '/nowhere'" in error_of(capsys, "--config", "/nowhere")
    monkeypatch.setenv("FASTDEPLOY_CONFIG", "/nowhere")
    assert "expected a YAML file, got '/nowhere'" in error_of(capsys)


@pytest.mark.parametrize("value", ["x", "0"])
def test_a_bad_variable_is_refused_by_name(capsys, monkeypatch, value):
    monkeypatch.setenv("FASTDEPLOY_MAX_NUM_SEQS", value)
    assert "FASTDEPLOY_MAX_NUM_SEQS: expected a" in error_of(capsys)


def test_a_key_is_not_repeated_in_an_error_or_in_the_settings(file, capsys):
    file.write_text("api_key: {secret: 1}\n")
    assert "secret" not in str(settings_of(parse("--api-key", "secret")))
    file.write_text("control_key: [secret]\n")
    assert "secret" not in error_of(capsys, "--config", str(file))


def test_the_url_that_kubernetes_puts_into_the_variable_of_the_port_is_ignored(monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_PORT", "tcp://10.0.0.1:8180")
    assert parse().port == 8180


def test_the_model_of_a_command_line_beats_that_of_a_file_in_both_forms(file):
    file.write_text("model: /of-the-file\n")
    args = parse("--config", str(file), "/word")
    assert (args.folder, args.model) == ("/word", None)
    assert parse("--config", str(file)).model == "/of-the-file"
    assert parse("--config", str(file), "--model", "/flag").model == "/flag"


def test_keys_in_the_environment_are_no_files_of_keys(monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_API_KEY", "the-key")
    monkeypatch.setenv("FASTDEPLOY_CONTROL_KEY", "another")
    args = parse()
    assert (args.api_key, args.control_key) == (None, None)


def test_settings_of_a_fleet_come_from_a_file_too(file):
    file.write_text("replicas: 3\nmax_num_seqs: 4\n")
    args = parser().parse_args(["fleet", "--config", str(file)])
    assert (args.replicas, args.max_num_seqs) == (3, 4)


def test_a_variable_that_is_nearly_a_setting_is_told():
    environment = {"FASTDEPLOY_MAX_NUM_SEQ": "1", "FASTDEPLOY_PORT": "1", "FASTDEPLOY_SERVICE_HOST": "x", "OTHER": ""}
    names = list(parse().sources)
    assert misspelt_variables(environment, names, NO_SETTINGS) == [
        ("FASTDEPLOY_MAX_NUM_SEQ", "FASTDEPLOY_MAX_NUM_SEQS")
    ]
