"""The decisions of a control call over a fleet, as tables. No messages, no clock and no replicas are here.

    PREPARING --all accept--> COMMITTING --all answer--> DONE
        \\--one refuses--> ROLLING_BACK --all answer--> FAILED

Every replica that takes part is asked to prepare. Once all have answered, or the deadline has passed, OUTCOMES says how
the call goes on. A replica that was lost, or that missed a deadline, has no say: it is fenced, and its state is
forgotten until it joins again. So at the end all members have done the call, or none has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple


class Rule(Enum):
    """How a call ends. READ: changes nothing. AGREE: cannot be undone, so if one replica did it, those that refused it
    are fenced. UNDO: done by the first message, and undone if a replica refuses. COMMIT: the first message changes
    nothing that requests see; the second one makes the change, and is not expected to be refused."""

    READ = "read"
    AGREE = "agree"
    UNDO = "undo"
    COMMIT = "commit"


class Command(Enum):
    """What the gateway asks of a participant."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ROLLBACK = "rollback"


class Vote(Enum):
    """The states of a participant. In those of WAITING it owes an answer; the value there is the command that it has
    not answered."""

    ASKED = "asked"
    PREPARED = "prepared"
    REFUSED = "refused"
    COMMITTING = "asked to commit"
    COMMITTED = "committed"
    DECLINED = "refused to commit"
    UNDOING = "asked to roll back"
    UNDONE = "rolled back"
    LOST = "lost"


class Phase(Enum):
    PREPARING = "preparing"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    DONE = "done"
    FAILED = "failed"


class Tally(Enum):
    """The answers of all participants that are not lost, taken together."""

    ALL = "all accepted"
    SOME = "some accepted"
    NONE = "none accepted"
    NOBODY = "all are lost"


P, V, C, R, T = Phase, Vote, Command, Rule, Tally

# (vote, answered command, accepted) -> vote. Other answers are late or doubled, and change nothing.
ANSWERS: dict[tuple[Vote, Command, bool], Vote] = {
    (V.ASKED, C.PREPARE, True): V.PREPARED,
    (V.ASKED, C.PREPARE, False): V.REFUSED,
    (V.COMMITTING, C.COMMIT, True): V.COMMITTED,
    (V.COMMITTING, C.COMMIT, False): V.DECLINED,
    (V.UNDOING, C.ROLLBACK, True): V.UNDONE,
    (V.UNDOING, C.ROLLBACK, False): V.LOST,  # nobody knows what this replica has
}
WAITING: dict[Vote, Command] = {V.ASKED: C.PREPARE, V.COMMITTING: C.COMMIT, V.UNDOING: C.ROLLBACK}
ACCEPTED = frozenset({V.PREPARED, V.COMMITTED, V.UNDONE})
REFUSED = frozenset({V.REFUSED, V.DECLINED})  # a refusal stands, even if its replica is lost afterwards

# (phase, rule) -> the next phase for each tally, once nobody is waited for.
OUTCOMES: dict[tuple[Phase, Rule], dict[Tally, Phase]] = {
    (P.PREPARING, R.READ): {T.ALL: P.DONE, T.SOME: P.FAILED, T.NONE: P.FAILED, T.NOBODY: P.FAILED},
    (P.PREPARING, R.AGREE): {T.ALL: P.DONE, T.SOME: P.DONE, T.NONE: P.FAILED, T.NOBODY: P.FAILED},
    (P.PREPARING, R.UNDO): {T.ALL: P.DONE, T.SOME: P.ROLLING_BACK, T.NONE: P.ROLLING_BACK, T.NOBODY: P.FAILED},
    (P.PREPARING, R.COMMIT): {T.ALL: P.COMMITTING, T.SOME: P.ROLLING_BACK, T.NONE: P.ROLLING_BACK, T.NOBODY: P.FAILED},
    (P.COMMITTING, R.COMMIT): {T.ALL: P.DONE, T.SOME: P.DONE, T.NONE: P.ROLLING_BACK, T.NOBODY: P.FAILED},
    (P.ROLLING_BACK, R.UNDO): {T.ALL: P.FAILED, T.NOBODY: P.FAILED},
    (P.ROLLING_BACK, R.COMMIT): {T.ALL: P.FAILED, T.NOBODY: P.FAILED},
}
# Entering a phase sends a command to the participants that are not lost. A replica that refused gets a rollback too,
# because it may have done a part of the call.
ENTRY: dict[Phase, tuple[Command, Vote]] = {
    P.COMMITTING: (C.COMMIT, V.COMMITTING),
    P.ROLLING_BACK: (C.ROLLBACK, V.UNDOING),
}


class Send(NamedTuple):
    """The action to send the messages of this command to the replica. If there are none, the command counts as
    accepted."""

    name: str
    command: Command


class Fence(NamedTuple):
    """The action to cut the replica off, and to have it join again."""

    name: str
    why: str


Action = Send | Fence


class Transaction:
    """One control call. Each method takes an event, and returns the actions that follow, in order.

    phase: DONE or FAILED at the end. votes: by the name of the replica."""

    def __init__(self, names: Iterable[str], rule: Rule):
        self.rule = rule
        self.phase = Phase.PREPARING
        self.votes = dict.fromkeys(names, Vote.ASKED)
        self._num_waited_for = len(self.votes)  # kept, so that a call takes time in proportion to its participants
        assert self.votes, "a transaction needs a participant"

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def start(self) -> list[Action]:
        """Ask everybody. Call this once, before any event."""
        return [Send(name, Command.PREPARE) for name in self.votes]

    def answer(self, name: str, command: Command, accepted: bool) -> list[Action]:
        """``name`` has accepted or refused ``command``."""
        vote = ANSWERS.get((self.votes[name], command, accepted))
        if vote is None:
            return []
        self._vote(name, vote)
        refused = [Fence(name, "the rollback was refused")] if vote is Vote.LOST else []
        return [*refused, *self._go_on()]

    def lose(self, name: str, why: str) -> list[Action]:
        """The connection to ``name`` has ended, or no message can be sent there."""
        if self.ended or self.votes[name] in REFUSED or self.votes[name] is Vote.LOST:
            return []
        self._vote(name, Vote.LOST)
        return [Fence(name, why), *self._go_on()]

    def deadline(self, command: Command) -> list[Action]:
        """The deadline of ``command`` has passed: whoever has not answered is lost."""
        late = [name for name, vote in self.votes.items() if WAITING.get(vote) is command]
        for name in late:
            self._vote(name, Vote.LOST)
        fences = [Fence(name, f"no answer within the deadline ({command.value})") for name in late]
        return [*fences, *self._go_on()] if late else []

    def tally(self) -> Tally:
        present = [vote for vote in self.votes.values() if vote is not Vote.LOST]
        accepted = sum(vote in ACCEPTED for vote in present)
        if not present:
            return Tally.NOBODY
        if accepted == len(present):
            return Tally.ALL
        return Tally.SOME if accepted else Tally.NONE

    def _vote(self, name: str, vote: Vote) -> None:
        self._num_waited_for += (vote in WAITING) - (self.votes[name] in WAITING)
        self.votes[name] = vote

    def _go_on(self) -> Iterator[Action]:
        """Enter the next phase if nobody is waited for."""
        if self.ended or self._num_waited_for:
            return
        tally = self.tally()
        self.phase = OUTCOMES[self.phase, self.rule][tally]
        if self.phase is Phase.DONE and tally is Tally.SOME:
            for name in [name for name, vote in self.votes.items() if vote in REFUSED]:
                self._vote(name, Vote.LOST)
                yield Fence(name, "it refused what another replica has done")
        if self.phase in ENTRY:
            command, vote = ENTRY[self.phase]
            names = [name for name, before in self.votes.items() if before is not Vote.LOST]
            for name in names:
                self._vote(name, vote)
            yield from [Send(name, command) for name in names]
