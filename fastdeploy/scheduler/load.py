"""The work in the engine, by the client that sent it. Kept up to date by each request that comes, begins and ends, so
that telling it takes no time in proportion to the requests."""

from __future__ import annotations

from fastdeploy.core.request import Group, Request


class _Work:
    """Unfinished work. choices: that have not ended. prompt_tokens: of the groups without a token, those that no cache
    is expected to have. context: the sum of the prompts of the choices, in tokens."""

    __slots__ = ("choices", "context", "prompt_tokens")

    def __init__(self) -> None:
        self.choices = self.prompt_tokens = self.context = 0


class LoadBook:
    """The unfinished work of all requests, and the part of each client. changed: set by each change."""

    def __init__(self) -> None:
        self._all = _Work()
        self.changed = False
        self._by_sender: dict[str, _Work] = {}

    def add(self, request: Request) -> None:
        """Count one choice of a group, and with the first choice the group's prompt."""
        group = request.group
        self.changed = True
        if group.sender not in self._by_sender:
            self._by_sender[group.sender] = _Work()
        for work in (self._all, self._by_sender[group.sender]):
            work.choices += 1
            work.context += request.num_prompt_tokens
        if request is group.requests[0]:
            group.prefill = max(request.num_prompt_tokens - group.add.expected_cached, 0)
            self._count_prompt(group, group.prefill)

    def started(self, group: Group) -> None:
        """Count the prompt of ``group`` as computed."""
        self._count_prompt(group, -group.prefill)
        group.prefill = 0

    def end(self, request: Request) -> None:
        """Count nothing any more of a choice."""
        group = request.group
        self.changed = True
        if group.prefill:
            self.started(group)
        for work in (self._all, self._by_sender[group.sender]):
            work.choices -= 1
            work.context -= request.num_prompt_tokens
        if not self._by_sender[group.sender].choices:
            del self._by_sender[group.sender]

    def beside(self, client: str) -> tuple[int, int, int]:
        """Return the work that others than ``client`` have sent: (choices, prompt_tokens, context)."""
        everything, own = self._all, self._by_sender.get(client)
        if own is None:
            return everything.choices, everything.prompt_tokens, everything.context
        return (
            everything.choices - own.choices,
            everything.prompt_tokens - own.prompt_tokens,
            everything.context - own.context,
        )

    def check_integrity(self, live: list[Request]) -> None:
        """Assert that the sums are those of the requests that have not ended."""
        work = self._all
        assert work.choices == len(live) == sum(part.choices for part in self._by_sender.values())
        assert work.context == sum(request.num_prompt_tokens for request in live)
        assert work.prompt_tokens == sum({id(r.group): r.group.prefill for r in live}.values())

    def _count_prompt(self, group: Group, tokens: int) -> None:
        self.changed = True
        self._all.prompt_tokens += tokens
        self._by_sender[group.sender].prompt_tokens += tokens
