"""vLLM's weight-transfer routes, and SkyRL's by /collective_rpc, over real HTTP, before a scripted engine."""

from __future__ import annotations

import httpx
import pytest

from fastdeploy.core.weight_source import FolderSource, SharedMemorySource
from fastdeploy.inter_communicator import messages as m
from support.http_calls import answer, refused
from support.upload_engine import SESSION, UploadEngine

LABEL = {"version": "step-7", "weight_epoch": 3, "boot_id": "boot-1", "asleep": []}
OPEN = {"session_id": "s-1", "placed_by": "vllm"}
ADDED = {"session_id": "s-1", "tensors": 3}
BEGUN = {"session_id": "s-1", "lease_s": 300.0}
NCCL = {"master_address": "10.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 2, "packed": True}
OCTETS = {"content-type": "application/octet-stream"}
SENT = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}


def with_session(stack, session: dict | None, failure: m.Failure | None = None) -> None:
    """Let the engine have this open session. ``failure``: the engine's answer to a part."""
    answer(stack, m.WeightInfoArgs, {**LABEL, "session": session})

    def add(call: m.Call) -> m.Reply:
        found = session is not None and call.args.placed_by == session["placed_by"]
        return m.Reply(call.call_id, ADDED if found else {"session_id": None}, failure if found else None)

    stack.engine.replies[m.UpdatePartArgs] = add
    ended = m.Failure("wrong_order", "no weight update is open")
    answer(stack, m.CommitUpdateArgs, {"version": "9", "weight_epoch": 4}, None if session == OPEN else ended)


def rpc(stack, method: str, **kwargs) -> httpx.Response:
    return stack.post("/collective_rpc", method=method, **({"kwargs": kwargs} if kwargs else {}))


@pytest.mark.parametrize("info", [NCCL, {"backend": "nccl"}])
def test_a_missing_transport_is_refused_before_a_client_waits_for_it(module_stack, info):
    refused(module_stack.post("/init_weight_transfer_engine", init_info=info), "init_info", "model_path")
    refused(rpc(module_stack, "init_weight_transfer_engine_rdt", init_info=info), "init_info", "shared_memory")


@pytest.mark.parametrize("info", [{}, {"backend": "upload"}])
def test_existing_transports_need_no_setup(module_stack, info):
    assert module_stack.post("/init_weight_transfer_engine", init_info=info).status_code == 200


def test_a_missing_init_info_is_refused(module_stack):
    refused(module_stack.post("/init_weight_transfer_engine"), "init_info")


def test_prime_rl_publishes_a_folder(module_stack):
    """The calls of prime-rl's update_weights, with the broadcast by the file system."""
    for kind in (m.PauseArgs, m.ResumeArgs):
        answer(module_stack, kind)
    answer(module_stack, m.UpdateWeightsArgs, LABEL)
    pause = module_stack.http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    update = module_stack.post("/update_weights", weight_dir="/runs/broadcasts/step_7")
    assert [reply.status_code for reply in (pause, update, module_stack.http.post("/resume"))] == [200] * 3
    assert module_stack.engine.expect(m.PauseArgs).args.clear_cache is False
    args = module_stack.engine.expect(m.UpdateWeightsArgs).args
    assert args == m.UpdateWeightsArgs(FolderSource("/runs/broadcasts/step_7"))
    assert update.json()["report"]["version"] == "step-7"


@pytest.mark.parametrize("folder", [None, "", 5])
def test_an_update_of_prime_rl_without_a_folder_is_refused(module_stack, folder):
    """Null is what prime-rl sends for its broadcast by NCCL."""
    refused(module_stack.post("/update_weights", weight_dir=folder), "weight_dir")


@pytest.mark.parametrize(
    "info", [SENT, {**SENT, "packed": True}, {**SENT, "ipc_handles_pickled": "gASV"}, {}, None, "x"]
)
def test_an_update_by_another_transport_says_what_works(module_stack, info):
    refused(module_stack.post("/update_weights", update_info=info), "update_info", "model_path", "octet-stream")
    refused(rpc(module_stack, "update_weights_ipc", update_info=info), "update_info", "shared_memory")
    refused(rpc(module_stack, "update_weights_nccl", update_info=info), "update_info", "shared_memory")


@pytest.mark.parametrize(
    ("info", "field"),
    [({"model_path": "/x", "shared_memory": "y"}, "update_info"), ({"model_path": "/x", "unheard_of": 1}, "unheard_of"),
     ({"model_path": ""}, "model_path"), ({"model_path": "/x", "kv": "drop"}, "kv")],
)  # fmt: skip
def test_a_malformed_update_is_refused_by_name(module_stack, info, field):
    refused(module_stack.post("/update_weights", update_info=info), field)


def test_an_update_without_a_session_is_one_commit(stack):
    with_session(stack, None)
    answer(stack, m.UpdateWeightsArgs, {"status": "committed", "version": "8", "weight_epoch": 4})
    info = {"model_path": "/ckpt", "weight_version": 8, "kv": "recompute"}
    assert stack.post("/update_weights", update_info=info).json()["report"]["weight_epoch"] == 4
    expected = m.UpdateWeightsArgs(FolderSource("/ckpt"), version="8", kv="recompute")
    assert stack.engine.expect(m.UpdateWeightsArgs).args == expected


def test_another_trainers_session_is_left_alone(stack):
    with_session(stack, {"session_id": "s-9", "placed_by": "native"})
    answer(stack, m.UpdateWeightsArgs, failure=m.Failure("update_in_progress", "another session is open"))
    reply = stack.post("/update_weights", update_info={"model_path": "/ckpt"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "update_in_progress")
    assert stack.post("/finish_weight_update").status_code == 409


DATA = b"\x10\0\0\0\0\0\0\0" + bytes(100_000)


def test_an_upload_without_a_session_is_an_update_of_its_own(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    engine = UploadEngine(stack.engine)
    answer(stack, m.CheckUpdateArgs, {"session_id": None})
    path = '/update_weights?weight_version=9&partial=true&checksums={"a": "11"}'
    reply = stack.http.post(path, content=DATA, headers=OCTETS)
    assert reply.status_code == 200, reply.text
    assert reply.json()["report"]["version"] == "9" and engine.bodies == [DATA]
    (args,) = engine.calls
    assert args == m.UpdatePartArgs(SESSION, args.source, checksums={"a": "11"})
    begin = m.BeginUpdateArgs("9", partial=True, ends_with_client=True)
    assert engine.sessions == [begin, m.CommitUpdateArgs(SESSION)]


def test_an_upload_in_a_session_is_a_part_of_it(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    engine = UploadEngine(stack.engine)
    answer(stack, m.CheckUpdateArgs, {"session_id": SESSION, "lease_s": 300.0})
    reply = stack.http.post("/update_weights?weight_version=9", content=DATA, headers=OCTETS)
    assert reply.json()["report"]["session_id"] == SESSION and engine.bodies == [DATA]
    assert stack.engine.expect(m.CheckUpdateArgs).args.placed_by == "vllm"
    (args,) = engine.calls
    assert args == m.UpdatePartArgs(SESSION, args.source, version="9")
    refused(stack.http.post("/update_weights?kv=recompute", content=DATA, headers=OCTETS), "update_info.kv")
    assert engine.bodies == [DATA]


def test_a_refused_upload_leaves_no_file(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    engine = UploadEngine(stack.engine)
    failure = m.Failure("weight_update_refused", "no such tensor")
    engine.refuse = lambda args: failure
    assert stack.http.post("/update_weights", content=b"x" * 99, headers=OCTETS).status_code == 400
    assert [type(call) for call in engine.calls] == [m.UpdatePartArgs]
    refused(stack.http.post("/update_weights", content=b"", headers=OCTETS), "body")
    assert list(tmp_path.iterdir()) == []


def test_start_update_finish_are_the_calls_of_one_session(stack):
    answer(stack, m.BeginUpdateArgs, BEGUN)
    assert stack.post("/start_weight_update", is_checkpoint_format=True).json()["session_id"] == "s-1"
    assert stack.engine.expect(m.BeginUpdateArgs).args == m.BeginUpdateArgs(placed_by="vllm")
    with_session(stack, OPEN)
    memory = {"shared_memory": "/seg", "nbytes": 64, "checksums": {"a": "11"}}
    assert stack.post("/update_weights", update_info=memory).json()["report"] == ADDED
    expected = m.UpdatePartArgs(None, SharedMemorySource("/seg", 64), checksums={"a": "11"}, placed_by="vllm")
    assert stack.engine.seen.get_nowait().args == expected, "one call: the engine finds the session"
    assert stack.engine.seen.empty()
    finished = stack.post("/finish_weight_update", weight_version=9).json()
    assert (finished["weight_version"], finished["report"]["weight_epoch"]) == ("9", 4)
    assert stack.engine.expect(m.CommitUpdateArgs).args == m.CommitUpdateArgs(None, version="9", placed_by="vllm")


def test_an_update_is_partial_only_if_it_was_started_as_partial(stack):
    """TRL finishes an update even if sending it failed. The engine then refuses the incomplete update."""
    answer(stack, m.BeginUpdateArgs, BEGUN)
    for body, partial in (({}, False), ({"partial": True}, True)):
        stack.post("/start_weight_update", **body)
        assert stack.engine.expect(m.BeginUpdateArgs).args.partial is partial
    with_session(stack, OPEN)
    info = {"model_path": "/x", "partial": True}
    refused(stack.post("/update_weights", update_info=info), "update_info.partial")


def test_finishing_without_a_session_is_refused_as_wrong_order(stack):
    with_session(stack, None)
    for reply in (stack.http.post("/finish_weight_update"), rpc(stack, "skyrl_finish_weight_update")):
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "wrong_order")


def test_only_the_format_of_checkpoints_is_known(module_stack):
    refused(module_stack.post("/start_weight_update", is_checkpoint_format=False), "is_checkpoint_format")


def test_a_refused_part_says_why(stack):
    with_session(stack, OPEN, m.Failure("weight_update_refused", "a: expected shape [2], got [3]"))
    reply = stack.post("/update_weights", update_info={"model_path": "/x"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "a: expected shape [2], got [3]")


def test_skyrls_worker_methods_are_the_same_session(stack):
    answer(stack, m.BeginUpdateArgs, BEGUN)
    started = rpc(stack, "skyrl_start_weight_update", is_checkpoint_format=True)
    assert started.json() == {"results": [BEGUN]}
    with_session(stack, OPEN)
    for method in ("update_weights_disk", "update_weights_ipc", "update_weights_nccl", "update_weights_rdt"):
        assert rpc(stack, method, update_info={"model_path": "/c"}).json() == {"results": [ADDED]}
        assert stack.engine.expect(m.UpdatePartArgs).args.source == FolderSource("/c")
    assert rpc(stack, "skyrl_finish_weight_update").json() == {"results": [{"version": "9", "weight_epoch": 4}]}


@pytest.mark.parametrize("body", [{"method": "os.system"}, {}, {"method": "update_weights", "args": ["x"]}])
def test_an_unknown_worker_method_is_refused(module_stack, body):
    refused(module_stack.post("/collective_rpc", **body), "args" if "args" in body else "method")


def test_the_refusal_lists_the_known_methods(module_stack):
    refused(rpc(module_stack, "layerwise_reload"), "method", "skyrl_start_weight_update", "update_weights_disk")
