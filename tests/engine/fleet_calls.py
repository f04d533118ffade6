"""Calls of the gateway of a fleet to a harness."""

from __future__ import annotations

from fastdeploy.inter_communicator import messages as m
from support.fake_runner import adapter_fingerprint
from support.harness import Harness

GATEWAY = "g"


def lead(
    h: Harness, term: int = 1, controller: str = "gw-1", client: str = GATEWAY, lease_s: float = 10.0, **fields: int
) -> m.Reply:
    """Let ``client`` lead. The client connects first if it is new. fields: others of LeadArgs."""
    if client not in h.engine.delivery.clients:
        h.connect(client)
    return h.ask(m.LeadArgs("fleet-1", controller, term, lease_s, **fields), client)


def led(**config) -> Harness:
    """Return a harness that the client GATEWAY leads in term 1."""
    h = Harness(**config)
    assert lead(h).failure is None
    return h


def prepare(h: Harness, session: str, **args) -> m.Reply:
    """Prepare the commit of a session."""
    return h.ask(m.CommitUpdateArgs(session, prepare=True, **args), rounds=2)


def load_prepared(h: Harness, name: str, content: int | str, **args) -> None:
    """Load an adapter up to its commit."""
    reply = h.load_adapter(name, content, prepare=True, **args)
    fingerprint = adapter_fingerprint(f"a{content}" if isinstance(content, int) else content)
    assert reply.failure is None and (reply.result["lora_name"], reply.result["status"]) == (name, "prepared")
    assert reply.result["fingerprint"] == fingerprint
