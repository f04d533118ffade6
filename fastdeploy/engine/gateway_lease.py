"""The gateway that leads this engine.

An engine that no gateway has led takes every call from every client. From the first LeadArgs on, the engine belongs to
a fleet for as long as it runs: only the connection that leads may change its state, also after the end of the lease.
So nobody changes the state of one replica alone while the fleet has no gateway. Each call declares who may make it, see
inter_communicator/control_call.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

from fastdeploy.core.errors import InvalidField, NotLeader
from fastdeploy.engine.field_checks import MAX_EPOCH, check_label, check_seconds
from fastdeploy.inter_communicator import messages as m

log = logging.getLogger("fastdeploy.engine")


class GatewayLease:
    """The connection that leads this engine, with its term and its lease. clock: monotonic seconds. clients: those that
    are connected. last_change: (term, number) of the last change of the fleet that came, see messages.Call."""

    def __init__(self, clock: Callable[[], float], clients: Container[str]):
        self._clock = clock
        self._clients = clients
        self.fleet = ""
        self.controller = ""
        self.term = 0
        self.last_change = (0, 0)
        self.gateway = ""  # name of the connection that leads,
        self._address = ""  # and the address at which other gateways reach it
        self._expires_at = 0.0

    def lead(self, args: m.LeadArgs, client: str) -> None:
        """Let ``client`` lead from now on, or renew its lease. Raises InvalidField or NotLeader, see messages.LeadArgs.
        A term belongs to one controller, also when its lease has ended. Terms of other fleets count too, so an engine
        that changes its fleet gets a higher one."""
        _check(args)
        if args.term < self.term:
            raise self._refusal(f"term {args.term} is over")
        if args.controller != self.controller and self.term:
            if args.term == self.term:
                raise self._refusal(f"term {args.term} is taken")
            if self.gateway in self._clients and self._clock() < self._expires_at:
                raise self._refusal("the lease of another controller runs")
        if (args.fleet, args.controller, args.term) != (self.fleet, self.controller, self.term):
            log.info("controller %r of fleet %r leads in term %d", args.controller, args.fleet, args.term)
        self.fleet, self.controller, self.term, self.gateway = args.fleet, args.controller, args.term, client
        self._address = args.gateway
        self._expires_at = self._clock() + args.lease_s

    def leads(self, client: str) -> bool:
        """Return whether ``client`` may make every call."""
        return not self.term or client == self.gateway

    def check(self, args: m.Args, client: str) -> None:
        """Raise NotLeader if ``client`` may not make this call now."""
        if not self.leads(client) and args.needs_leader():
            raise self._refusal("this call changes the state of the engine")

    def note_change(self, change: int, client: str) -> None:
        """Record that a call of the leader is change number ``change`` of the whole fleet. 0 = it is none."""
        if change and client == self.gateway:
            self.last_change = max(self.last_change, (self.term, change))

    def describe(self) -> dict[str, Any]:
        """Return {"fleet", "controller", "term"}."""
        return {"fleet": self.fleet, "controller": self.controller, "term": self.term}

    @property
    def leader(self) -> str:
        """The address of the gateway that leads, see messages.FleetStateArgs."""
        return self._address if self.gateway in self._clients else ""

    def _refusal(self, why: str) -> NotLeader:
        leader = f"controller {self.controller!r} leads it in term {self.term}"
        left = round(max(self._expires_at - self._clock(), 0.0), 3)
        return NotLeader(
            f"{why}: the engine belongs to fleet {self.fleet!r}, and {leader}; make the call at the fleet's gateway",
            **self.describe(),
            **({"leader": self.leader} if self.leader else {}),
            lease_left_s=left,
        )


def _check(args: m.LeadArgs) -> None:
    check_label("fleet", args.fleet)
    check_label("controller", args.controller)
    if not 1 <= args.term <= MAX_EPOCH:
        raise InvalidField("term", f"expected an integer from 1 to 2**53 - 1, got {args.term}")
    check_seconds("lease_s", args.lease_s)
    if not 0 <= args.past_adapter_epoch <= MAX_EPOCH:
        expected = f"expected an integer from 0 to 2**53 - 1, got {args.past_adapter_epoch}"
        raise InvalidField("past_adapter_epoch", expected)
