"""The declaration of a control call: its arguments, and who may make it."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec


class Access(Enum):
    """The callers that may make a call. READ: everybody, since it changes nothing; a gateway answers it too while it
    does not lead. ANYONE: everybody at an engine, and at a gateway as long as it leads. LEADER: once a gateway has led
    the engine, only the gateway that leads."""

    READ = "read"
    ANYONE = "anyone"
    LEADER = "leader"


class Args(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the arguments of all control calls. A control call is a subclass, and one method of the engine that is
    marked with ``handles`` (engine/handlers.py).

    access: see Access. one_member: a gateway lets one member answer for all. Otherwise it makes the call on all
    members and merges their answers. If the call is no READ, a member that refuses what another member has done is
    fenced. A call that a fleet makes in another way has a class of its own in fleet/calls.py. shows_replicas: the
    answer of a gateway has a list "replicas"."""

    access: ClassVar[Access] = Access.LEADER
    one_member: ClassVar[bool] = False
    shows_replicas: ClassVar[bool] = True

    def needs_leader(self) -> bool:
        """Return whether an engine of a fleet takes this call from its gateway only."""
        return self.access is Access.LEADER
