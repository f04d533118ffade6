"""The calls that the gateways of one fleet make on each other. One of them leads the engines; the others follow it."""

from __future__ import annotations

from fastdeploy.inter_communicator.control_call import Args


class FollowArgs(Args, frozen=True):
    """The question of a gateway that follows to the one that leads: what of the fleet has changed? gateway: address of
    the one that asks. term, after: of the view that it has (see fleet/view.py), and acknowledges by this; 0 = none.

    Reply: {"view": the newest view, or null}. It comes as soon as there is a newer view, and without one after a while.
    From the moment in which the question was sent, the view is valid for ``fence_after_s`` seconds. NotLeader with
    "began" = false from a gateway that does not lead."""

    gateways_only = True
    leader_only = False

    gateway: str
    term: int = 0
    after: int = 0
