"""The trajectory of a session: one row for each leaf of its trees of turns.

A row is a sequence of tokens as the model has seen it: prompts, tool results and answers, up to the last answer of a
branch. ``loss_mask`` is 1 for the tokens that were sampled. Two rows may begin with the same turns; then the later one
names the earlier one and the number of tokens (``shared_prefix``), so that a trainer can use each token once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastdeploy.http.sessions.turns_table import TOKEN_BYTES, StoredTurn, detail_of, from_bytes, from_doubles


class Piece(NamedTuple):
    """The part of a row that one turn stores: the ids [start, end) of the row."""

    turn: StoredTurn
    start: int
    end: int


def rows(turns: Sequence[StoredTurn]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a session. turns: all of them, in their order, each at the index of its number."""
    continued = {turn.parent for turn in turns if turn.parent is not None and turn.shared == turns[turn.parent].length}
    seen: dict[int, tuple[int, int]] = {}  # turn -> the row that has most of its ids so far, and how many from the root
    for leaf in turns:
        if leaf.number in continued:
            continue
        path = _path(turns, leaf)
        yield _row(path, _shared(path, seen))
        for piece in path:
            if piece.end > seen.get(piece.turn.number, (0, -1))[1]:
                seen[piece.turn.number] = leaf.number, piece.end


def _path(turns: Sequence[StoredTurn], leaf: StoredTurn) -> list[Piece]:
    """Return the pieces of a row, from its beginning on."""
    path, turn, end = [], leaf, leaf.length
    while True:
        start = min(turn.shared, end)
        path.append(Piece(turn, start, end))
        if turn.parent is None:
            return path[::-1]
        turn, end = turns[turn.parent], start


def _shared(path: Sequence[Piece], seen: dict[int, tuple[int, int]]) -> dict[str, int] | None:
    for piece in reversed(path):
        if (known := seen.get(piece.turn.number)) is not None and (length := min(known[1], piece.end)) > 0:
            return {"leaf": known[0], "length": length}
    return None


def _row(path: Sequence[Piece], shared: dict[str, int] | None) -> dict[str, Any]:
    ids, mask, logprobs, shown = [], [], [], []
    for turn, start, end in path:
        own = from_bytes((turn.prompt + turn.sampled)[: (end - start) * TOKEN_BYTES])
        num_sampled = max(end - turn.prompt_length, 0)
        num_prompt = len(own) - num_sampled
        ids += own
        mask += [0] * num_prompt + [1] * num_sampled
        logprobs += [0.0] * num_prompt + from_doubles(turn.logprobs)[:num_sampled]
        if num_sampled:
            shown.append(_turn(turn, end))
    return {
        "leaf": path[-1].turn.number,
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": logprobs,
        "shared_prefix": shared,
        "turns": shown,
    }


def _turn(turn: StoredTurn, end: int) -> dict[str, Any]:
    """Return what a row says of a turn. Positions are those of the row."""
    detail, base = detail_of(turn), turn.prompt_length
    spans = [span | {"start": span["start"] + base, "end": span["end"] + base} for span in detail["weight_versions"]]
    return {"turn": turn.number, "start": base, "end": end, **detail, "weight_versions": spans}
