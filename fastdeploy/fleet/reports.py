"""One report made of the reports of all replicas, in the form of a single engine's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import FastDeployError, FleetCallFailed, from_wire
from fastdeploy.fleet.transaction import Vote

Values = Sequence[Any]


def _union(values: Values) -> list[Any]:
    return list(dict.fromkeys(item for value in values for item in value))


def _in_all(values: Values) -> list[Any]:
    return [item for item in values[0] if all(item in value for value in values)]


def _total(values: Values) -> Any:
    return sum(values) if all(isinstance(value, int | float) for value in values) else values[0]


def _highest(values: Values) -> Any:
    return max((value for value in values if value is not None), default=None)


def _lowest(values: Values) -> Any:
    return min((value for value in values if value is not None), default=None)


def _first_given(values: Values) -> Any:
    return next((value for value in values if value is not None), None)


def _phase(values: Values) -> Any:
    return "draining" if len(set(values)) > 1 and set(values) <= {"running", "draining", "paused"} else values[0]


def _status(values: Values) -> Any:
    return "held" if "held" in values else values[0]


def _strongest(*order: str) -> Callable[[Values], Any]:
    return lambda values: next((name for name in order if name in values), values[0])


def _by(key: str) -> Callable[[Values], list[Any]]:
    """Merge lists of dicts: the dicts with the same value of ``key`` are one."""

    def merge_lists(values: Values) -> list[Any]:
        groups: dict[Any, list[dict[str, Any]]] = {}
        for item in (item for value in values for item in value):
            groups.setdefault(item[key], []).append(item)
        return [merge(group) for group in groups.values()]

    return merge_lists


def _aborted(values: Values) -> Any:
    return _total(values) if isinstance(values[0], int) else _by("request_id")(values)


# How the values of a field become one. Dicts are merged field by field. Any other field has the value of the replica
# with the newest weights.
FIELDS: dict[str, Callable[[Values], Any]] = {
    **dict.fromkeys(("running", "frozen", "queued", "waiting", "drained", "kept", "tokens_returned"), _total),
    **dict.fromkeys(("requests_in_flight", "tokens_to_recompute", "requests_to_recompute"), _total),
    **dict.fromkeys(("freed_bytes", "requests", "output_token_count", "max_waiting", "max_num_seqs"), _total),
    **dict.fromkeys(("num_blocks", "standby_nbytes"), _total),
    **dict.fromkeys(("elapsed_ms", "stage_ms", "age_s", "past_adapter_epoch"), _highest),
    **dict.fromkeys(("copy", "read", "stage", "wait_for_step", "commit", "total"), _highest),  # of timings_ms
    **dict.fromkeys(("ttl_left_s", "lease_left_s", "max_model_len"), _lowest),
    **dict.fromkeys(("aborted_ids", "forced_ids", "slow_api_servers", "dropped_api_servers"), _union),
    **dict.fromkeys(("released", "still_held_by", "loads_aborted", "sessions_aborted", "asleep"), _union),
    "adapters_unloaded": _union,
    **dict.fromkeys(("is_paused", "success", "in_memory", "streams"), all),
    **dict.fromkeys(("rejecting_new_requests", "known", "replaced"), any),
    **dict.fromkeys(("escalated_by", "session", "session_id"), _first_given),
    **dict.fromkeys(("state", "phase"), _phase),
    "unknown": _in_all,
    "not_found": _in_all,
    "status": _status,
    "mode": _strongest("abort", "keep", "wait"),
    "admission": _strongest("reject", "hold"),
    "holds": _by("id"),
    "adapters": _by("lora_name"),
    "aborted": _aborted,
}


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the results of one call on several replicas, see FIELDS."""
    results = sorted(results, key=lambda result: -result.get("weight_epoch", 0))
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if name in FIELDS:
            merged[name] = FIELDS[name](values)
        elif all(isinstance(value, dict) for value in values):
            merged[name] = merge(values)
        else:
            merged[name] = values[0]
    return merged


def with_boot_id(report: dict[str, Any], boot_id: str) -> dict[str, Any]:
    """Return ``report`` with the boot id of the fleet in place of that of an engine, at any depth."""
    items = {name: with_boot_id(value, boot_id) if isinstance(value, dict) else value for name, value in report.items()}
    return items | {"boot_id": boot_id} if "boot_id" in items else items


def replica_report(
    name: str, vote: Vote, elapsed_ms: float, error: FastDeployError | None, fenced_because: str
) -> dict[str, Any]:
    """Return one entry of "replicas". elapsed_ms: until the last answer of the replica. error: the error it answered
    with."""
    status = {Vote.LOST: "fenced", Vote.UNDONE: "rolled_back"}.get(vote, "done")
    if error is not None and vote is not Vote.LOST:
        status = "refused"
    report: dict[str, Any] = {"name": name, "status": status, "elapsed_ms": round(elapsed_ms, 3)}
    if vote is Vote.LOST and error is None:
        report["error"] = {"code": "engine_dead", "message": fenced_because}
    elif error is not None:
        report["error"] = {"code": error.code, "message": error.message}
    return report


def refusal(errors: Mapping[str, FastDeployError], replicas: list[dict[str, Any]], boot_id: str) -> FastDeployError:
    """Return the error of a call that was refused: that of the replicas if it is the same for all of them.

    errors: by replica. replicas: the entries of "replicas", which become a part of the error. boot_id: of the fleet."""
    codes = {error.code for error in errors.values()}
    if len(codes) > 1:
        names = ", ".join(f"{name}: {error.code}" for name, error in errors.items())
        return FleetCallFailed(
            f"the replicas answered differently, and nothing was changed ({names})", replicas=replicas
        )
    first = next(iter(errors.values()))
    reports = [error.detail["report"] for error in errors.values() if "report" in error.detail]
    detail = {**first.detail} | ({"report": merge(reports)} if reports else {})
    return from_wire(first.code, first.message, with_boot_id(detail, boot_id) | {"replicas": replicas})


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus expositions, by replica. Every sample gets a label ``replica``; HELP and TYPE come once. Only
    "\\n" ends a line: the names of adapters may contain every other character that str.splitlines looks for."""
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        label = f'replica="{_escaped(name)}"'
        family = ""
        for line in text.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(kind, line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, label))
    lines: Iterable[str] = (
        line
        for family in dict.fromkeys([*heads, *samples])
        for line in [*heads.get(family, {}).values(), *samples.get(family, [])]
    )
    return "\n".join(lines) + "\n"


def _labelled(sample: str, label: str) -> str:
    """Add a label to a sample line. A name has no brace and no space, so the first of both ends it."""
    brace, space = sample.find("{"), sample.find(" ")
    if brace < 0 or space < brace:
        return f"{sample[:space]}{{{label}}}{sample[space:]}"
    comma = "" if sample[brace + 1] == "}" else ","
    return f"{sample[: brace + 1]}{label}{comma}{sample[brace + 1 :]}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
