"""The command line: flags become configs, and bad flags are refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import msgspec
import pytest

from fastdeploy.core.config import EngineConfig, ServeConfig, from_json, to_json
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import host_id
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli.flags import configs, read_start
from fastdeploy.entrypoints.cli.fleet import launcher_spec
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY
from support.command_line import parser


@pytest.fixture
def folder(tmp_path) -> str:
    """A folder that passes as a model."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def parse(*flags: str) -> tuple[EngineConfig, ServeConfig]:
    return configs(parser().parse_args(["serve", *flags]))


def test_flags_reach_the_configs_of_the_child_processes(folder):
    engine, http = parse(
        *("--model", folder, "--port", "0", "--workers", "3", "--max-num-seqs", "8", "--max-model-len", "512"),
        *("--num-gpu-blocks-override", "99", "--no-enable-prefix-caching", "--served-model-name", "q"),
    )
    assert (engine.max_num_seqs, engine.max_model_len, engine.num_gpu_blocks_override) == (8, 512, 99)
    assert engine.enable_prefix_caching is False
    assert (http.port, http.workers, http.served_model_name, engine.served_model_name) == (0, 3, "q", "q")
    assert from_json(to_json(engine), EngineConfig) == engine
    assert from_json(to_json(http), ServeConfig) == http


def test_unknown_settings_are_refused():
    with pytest.raises(msgspec.ValidationError):
        from_json('{"model": "m", "max_nmu_seqs": 1}', EngineConfig)


def test_any_weight_path_is_allowed_on_loopback_and_none_elsewhere_unless_named(folder):
    assert parse("--model", folder)[0].model_roots == ("/",)
    assert parse("--model", folder, "--host", "0.0.0.0")[0].model_roots == ()
    assert parse("--model", folder, "--host", "0.0.0.0", "--model-root", "/a")[0].model_roots == ("/a",)
    engine, http = parse("--model", folder, "--host", "0.0.0.0", "--pull-root", "/tmp")
    assert engine.model_roots == http.model_roots == ("/tmp",), "pulled weights cannot be loaded"
    assert http.pull_root == "/tmp"
    assert parse("--model", folder)[1].pull_root == ""


def test_a_tiny_model_is_served_by_its_name_unless_there_is_such_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    engine, _ = parse("--model", "llama")
    assert engine.model.startswith(f"{tmp_path}/cache/") and engine.served_model_name == "llama"
    (tmp_path / "llama").mkdir()
    with pytest.raises(InvalidField, match=f"expected a folder with a config.json, got '{tmp_path}/llama'"):
        parse("--model", "llama")
    (tmp_path / "llama" / "config.json").write_text("{}")
    assert parse("--model", "llama")[0].model == f"{tmp_path}/llama"


def test_a_model_that_is_neither_a_folder_nor_a_name_is_refused_with_the_names():
    with pytest.raises(InvalidField, match="or one of qwen3, llama, ernie, moe, got .*; nothing is downloaded"):
        parse("--model", "lama")


def test_a_tiny_model_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidField, match="moe cannot be written: .*Not a directory"):
        parse("--model", "moe")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "/nowhere"], "--model"),
        (["--port", "70000"], "--port"),
        (["--workers", "0"], "--workers"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--kv-cache-gb", "-1"], "--kv-cache-gb"),
        (["--max-nmu-seqs", "1"], "--max-nmu-seqs"),
        (["--dtype", "int3"], "--dtype"),
        (["--max-body-mb", "0"], "--max-body-mb"),
        (["--max-bodies-mb", "0"], "--max-bodies-mb"),
        (["--max-uploads", "0"], "--max-uploads"),
        (["--max-connections", "0"], "--max-connections"),
        (["--body-idle-s", "0"], "--body-idle-s"),
        (["--max-reply-logprobs", "0"], "--max-reply-logprobs"),
        (["--fleet-endpoint", "http://here:1"], "--fleet-endpoint"),
        (["--fleet-endpoint", "tcp://:1"], "--fleet-endpoint"),
        (["--fleet-endpoint", "tcp://here"], "--fleet-endpoint"),
        (["--fleet-endpoint", "tcp://here:65536"], "--fleet-endpoint"),
        (["--fleet-endpoint", "ipc:///" + "x" * 107], "--fleet-endpoint"),
    ],
)
def test_a_bad_flag_is_refused_by_name(folder, capsys, flags, named):
    with pytest.raises(SystemExit) as info:
        main(["serve", "--model", folder, *flags] if "--model" not in flags else ["serve", *flags])
    assert info.value.code == 2
    assert named in capsys.readouterr().err


REMOTE = "tcp://10.0.0.2:9000=http://10.0.0.2:8180"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "many"], "--replicas"),
        (["--fence-after-s", "0"], "--fence-after-s"),
        (["--failover-s", "-1"], "--failover-s"),
        (["--replica", "10.0.0.2:9000"], "--replica"),
        (["--replica", "tcp://10.0.0.2=http://10.0.0.2:8180"], "--replica"),
        (["--replica", "tcp://10.0.0.2:9000=10.0.0.2:8180"], "--replica"),
        (["--replica", "tcp://10.0.0.2:99999=http://10.0.0.2:8180"], "--replica"),
        (["--replica", "ipc:///a=http://127.0.0.1:1", "--replicas", "2"], "--replica"),
        (["--replica", REMOTE], "--fleet-key-file"),
        (["--fleet-key-file", "/nowhere"], "--fleet-key-file"),
        (["--fleet-endpoint", "tcp://0.0.0.0:9000"], "--fleet-endpoint"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_a_bad_flag_of_a_fleet_is_refused_by_name(folder, capsys, flags, named):
    with pytest.raises(SystemExit) as info:
        main(["fleet", "--model", folder, *flags])
    assert info.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_an_engine_on_the_network_needs_a_fleet_key(folder, tmp_path, capsys):
    flags = ["serve", "--model", folder, "--fleet-endpoint", "tcp://0.0.0.0:9000"]
    with pytest.raises(SystemExit):
        main(flags)
    assert "--fleet-key-file: FASTDEPLOY_FLEET_KEY: expected a fleet key" in capsys.readouterr().err
    (tmp_path / "key").write_text("too-short")
    with pytest.raises(SystemExit):
        main([*flags, "--fleet-key-file", str(tmp_path / "key")])
    error = capsys.readouterr().err
    assert "--fleet-key-file" in error and "too-short" not in error


def test_replicas_that_run_elsewhere_are_named_in_order(folder):
    args = parser().parse_args(["fleet", folder, "--replica", REMOTE, "--replica", "ipc:///run/e=http://h:1/"])
    spec = launcher_spec(args, fleet_key="0" * 64)
    assert [(p.name, p.endpoint, p.url) for p in spec.placements] == [
        ("replica-0", "tcp://10.0.0.2:9000", "http://10.0.0.2:8180"),
        ("replica-1", "ipc:///run/e", "http://h:1"),
    ]
    assert spec.placements[0].host == "10.0.0.2" and spec.placements[1].host == host_id()
    assert launcher_spec(parser().parse_args(["fleet", folder, "--replicas", "3"]), None) is None


@pytest.mark.parametrize("flag", ["--spill-dir", "--upload-dir"])
@pytest.mark.parametrize("kind", ["absent", "a file", "not writable"])
def test_a_folder_that_is_not_writable_is_refused_at_start(tmp_path, capsys, flag, kind):
    path = {"absent": tmp_path / "absent", "a file": tmp_path / "file", "not writable": "/proc"}[kind]
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as info:
        main(["serve", flag, str(path)])
    assert info.value.code == 2
    assert f"argument {flag}: expected a folder to write to, got {str(path)!r}" in capsys.readouterr().err


def test_the_model_may_be_named_without_a_flag_but_not_twice(folder):
    assert parse(folder) == parse("--model", folder)
    with pytest.raises(InvalidField, match="once"):
        parse(folder, "--model", folder)
    for flags in ([""], ["--model", ""]):  # as of a variable of a script that is not set
        with pytest.raises(InvalidField, match="^model: .*empty"):
            parse(*flags)


def serve(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fastdeploy", "serve", "--port", "0", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def only_line(done: subprocess.CompletedProcess) -> str:
    """Return the only line on the terminal, after checking that the exit status is REFUSED."""
    assert (done.returncode, done.stdout) == (2, "")
    # The log tells how far the start is, and without the C++ ops there is a warning.
    others = ("Paddle reference ops", " fastdeploy.entrypoints.loading_progress: ")
    [line] = [line for line in done.stderr.splitlines() if not any(other in line for other in others)]
    return line


def test_a_setting_that_the_engine_refuses_is_reported_in_one_line_with_its_flag():
    line = only_line(serve("--kv-cache-gb", "100000"))
    assert "cannot serve" in line and "--kv-cache-gb: a KV cache of 100000.0 GiB is more than" in line


@pytest.mark.parametrize(
    "file",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("tokenizer.json", "config.json")), "model.safetensors"],
)
def test_a_truncated_file_is_reported_in_one_line_with_its_name(tmp_path, file):
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    os.truncate(model / file, 200)
    assert only_line(serve(str(model), "--workers", "2")).startswith(f"fastdeploy: cannot serve {model}: {file}: ")


@pytest.mark.parametrize("key", ["", "short"])
def test_a_fleet_endpoint_on_the_network_needs_a_long_key_in_the_environment(folder, capsys, monkeypatch, key):
    monkeypatch.setenv(FLEET_KEY, key)
    with pytest.raises(SystemExit) as info:
        main(["serve", "--model", folder, "--fleet-endpoint", "tcp://0.0.0.0:0"])
    error = capsys.readouterr().err
    assert info.value.code == 2 and "--fleet-key-file" in error and FLEET_KEY in error
    assert FLEET_KEY not in os.environ


# ---------------------------------------------------------------------- faults


def start_refusal(command: str, *flags: str) -> str:
    """Return the error of ``read_start`` for the flags; "" = they are taken."""
    args = parser().parse_args([command, *flags])
    try:
        read_start(args)
    except InvalidField as error:
        return error.message
    return ""


@pytest.mark.parametrize("key", ["--api-key", "--control-key"])
def test_faults_are_refused_with_keys_on_an_address_that_others_reach(folder, tmp_path, key):
    secret = tmp_path / "key"
    secret.write_text("a-long-key")
    flags = ("--model", folder, "--faults", key, str(secret))
    assert start_refusal("serve", *flags) == ""
    why = start_refusal("serve", *flags, "--host", "0.0.0.0")
    assert why.startswith("faults: refused with keys on 0.0.0.0")
    assert start_refusal("serve", "--model", folder, "--faults", "--host", "0.0.0.0") == ""


def test_faults_need_one_api_server_and_a_schedule_that_can_be_read(folder, tmp_path):
    assert start_refusal("serve", folder, "--faults", "--workers", "2").startswith("workers: expected 1 with --faults")
    assert start_refusal("serve", folder, "--faults", "/nowhere").startswith("faults: expected a schedule file")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("rules: [{fault: death, of: replica}]")
    assert "of: replica is not here" in start_refusal("serve", folder, "--faults", str(scenario))
    assert start_refusal("fleet", folder, "--faults", str(scenario)) == ""


def test_faults_need_replicas_of_this_host(folder, capsys):
    replica = "ipc:///tmp/x.sock=http://127.0.0.1:1"
    with pytest.raises(SystemExit):
        main(["fleet", folder, "--faults", "--replica", replica, "--port", "0"])
    assert "--faults" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gateways", "0"], "--gateways: expected a number from 1 to 64, got 0"),
        (["--gateways", "2", "--faults"], "--gateways: expected 1 with --faults: one process counts, got 2"),
        (
            ["--gateway-endpoint", "tcp://10.0.0.1"],
            "--gateway-endpoint: expected tcp://HOST:PORT, got 'tcp://10.0.0.1'",
        ),
        (["--gateway-endpoint", "ipc:///x"], "--gateway-endpoint: expected tcp://HOST:PORT, got 'ipc:///x'"),
        (["--gateway-endpoint", "tcp://10.0.0.1:9"], "--gateway-endpoint: expected --replica with it"),
        (
            ["--gateway-endpoint", "tcp://10.0.0.1:9", "--replica", "ipc:///x=http://localhost:1"],
            "expected a fleet key in the environment, since tcp://10.0.0.1:9",
        ),
    ],
)
def test_gateways_that_a_fleet_cannot_have_are_refused_by_name(flags, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fleet", *flags])
    assert stopped.value.code == 2 and named in capsys.readouterr().err
