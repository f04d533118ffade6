"""GET /v1/adapters/export: the bytes of both files, and headers that tell which adapter they are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.http.guards.keys import Keys
from fastdeploy.inter_communicator import messages as m
from support.http_calls import answer, refused

ROUTE = "/v1/adapters/export"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def stack(make_stack, tmp_path):
    """Server whose engine keeps a copy of the adapter "a"."""
    (tmp_path / CONFIG).write_bytes(b'{"r": 8}')
    (tmp_path / TENSORS).write_bytes(b"tensors")
    stack = make_stack()
    copy = {"path": str(tmp_path), "lora_name": "a", "adapter_epoch": 2, "version": "v/ü", "fingerprint": "f"}
    answer(stack, m.ExportAdapterArgs, copy)
    return stack


@pytest.mark.parametrize(("query", "content"), [({}, b"tensors"), ({"file": CONFIG}, b'{"r": 8}')])
def test_the_reply_is_a_file_of_the_copy_and_its_headers_name_the_adapter(stack, query, content):
    reply = stack.http.get(ROUTE, params={"lora_name": "a", **query})
    assert reply.status_code == 200 and reply.content == content
    names = ("Epoch", "Version", "Fingerprint")
    assert [reply.headers[f"X-Adapter-{name}"] for name in names] == ["2", "v/%C3%BC", "f"]
    assert stack.engine.expect(m.ExportAdapterArgs).args == m.ExportAdapterArgs("a")


def test_no_other_file_is_answered(stack):
    refused(stack.http.get(ROUTE, params={"lora_name": "a", "file": "../secret"}), "file")
    refused(stack.http.get(ROUTE), "lora_name")


def test_a_copy_that_was_removed_meanwhile_is_a_conflict(stack, tmp_path):
    Path(tmp_path, TENSORS).unlink()
    reply = stack.http.get(ROUTE, params={"lora_name": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "update_in_progress")


def test_an_unknown_name_is_404(stack):
    answer(stack, m.ExportAdapterArgs, failure=m.Failure("model_not_found", "lora_name: there is no adapter 'b'"))
    assert stack.http.get(ROUTE, params={"lora_name": "b"}).status_code == 404


def test_the_route_needs_the_control_key(make_stack):
    stack = make_stack(keys=Keys(data=(b"data",), control=(b"control",)))
    for key, status in (("wrong", 401), ("data", 403)):
        reply = stack.http.get(ROUTE, params={"lora_name": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == status
