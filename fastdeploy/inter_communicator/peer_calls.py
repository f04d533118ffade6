"""The calls that the gateways of one fleet make on each other. One of them leads the engines; the others follow it."""

from __future__ import annotations

import msgspec

from fastdeploy.inter_communicator.control_call import Args, Failure
from fastdeploy.inter_communicator.weight_calls import LoadAdapterArgs, UpdatePartArgs, UpdateWeightsArgs

SourcedArgs = UpdateWeightsArgs | UpdatePartArgs | LoadAdapterArgs  # the calls that have a source


class FollowArgs(Args, frozen=True):
    """The question of a gateway that follows to the one that leads: what of the fleet has changed? gateway: address of
    the one that asks. term, after: of the view that it has (see fleet/view.py), and acknowledges by this; 0 = none.
    ended: for each call that is over in this view, how many choices it has ended in this gateway, and how many tokens
    they have, by the ids that clients know.

    Reply: {"view": the newest view (msgpack), or null}. It comes as soon as there is a newer view, and without one
    after a while. From the moment in which the question was sent, the view is valid for ``fence_after_s`` seconds.
    NotLeader with "began" = false from a gateway that does not lead."""

    gateways_only = True
    leader_only = False

    gateway: str
    term: int = 0
    after: int = 0
    ended: dict[str, dict[str, tuple[int, int]]] = {}


class ReplicaArgs(Args, frozen=True):
    """A call of an operator on replicas, which the gateway that leads makes. action: list, add, drain, undrain or
    remove. name: of the replica; "" for list and add. timeout_s: of a drain; None = that of a removed replica
    (FleetConfig.drain_s). Reply: the entry of the replica in GET /v1/replicas, {"name", "state"}, or for list
    {"replicas": all entries}."""

    gateways_only = True

    action: str
    name: str = ""
    timeout_s: float | None = None


class PlaceArgs(Args, frozen=True):
    """The question of a gateway to the home of a request (see fleet/homes.py): which replica shall have it? sender:
    address of the gateway that has the request. session, group, length, num: see Wanted (fleet/router.py). epoch: the
    oldest weight_epoch that the replica may serve. refused_by: names of replicas that have refused it. began:
    time.time() of the session's first request, as far as the gateway knows. replica, tokens: where it has seen the
    session last, and the length of the prefix there.

    Reply: {"replica": its name; "" = none may have it now}, and if there is one: {"cached": tokens of the prompt that
    are expected to be cached there, "known": those that the session has there, "began": of the session}."""

    gateways_only = True
    leader_only = False

    sender: str
    session: str
    group: str
    length: int
    num: int
    epoch: int
    refused_by: list[str]
    began: float
    replica: str
    tokens: int


class Copy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The copy of a source that one replica can read. boot_id: of the replica's engine for which it was made. path: of
    the file. failure: why there is no copy; None = there is one."""

    boot_id: str
    path: str = ""
    failure: Failure | None = None


class SentCallArgs(Args, frozen=True):
    """A call whose source only the processes of one host can read. The gateway that got the call is on that host. It
    has sent the source to the other hosts, and keeps the files until the reply. The gateway that leads makes the call.
    host: id of that host. copies: those for replicas on other hosts, by the name of the replica.

    Reply: that of the call. Or {"uncopied": {name: boot id of the engine}}: these members need a copy, since they have
    joined meanwhile. Then nothing has begun, and the call may be sent again with these copies, too."""

    gateways_only = True

    call: SourcedArgs
    host: str
    copies: dict[str, Copy]
