"""The declaration of a control call: its arguments, and who may make it."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Args(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the arguments of all control calls. A control call is a subclass, and one method of the engine that is
    marked with ``handles`` (engine/handlers.py).

    reads: the call changes nothing, so an engine takes it from everybody, and a gateway answers it also while it does
    not lead. leader_only: an engine that a gateway has led takes the call from the gateway that leads only, unless the
    call reads.
    one_member: a gateway lets one member answer for all. Otherwise it makes the call on all members and merges their
    answers. If the call does not only read, a member that refuses what another member has done is fenced. A call that
    a fleet makes in another way has a class of its own in fleet/calls.py. shows_replicas: the answer of a gateway has a
    list "replicas". gateways_only: a call between gateways, which no engine takes."""

    reads: ClassVar[bool] = False
    leader_only: ClassVar[bool] = True
    one_member: ClassVar[bool] = False
    shows_replicas: ClassVar[bool] = True
    gateways_only: ClassVar[bool] = False

    def needs_leader(self) -> bool:
        """Return whether an engine of a fleet takes this call from its gateway only."""
        return self.leader_only and not self.reads


class Failure(msgspec.Struct, frozen=True):
    """An exception of fastdeploy.core.errors on the wire."""

    code: str
    message: str
    detail: dict[str, Any] = {}
