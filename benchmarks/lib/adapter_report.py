"""The results of ``adapters.py``: the rows of its tables, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.lib.adapter_decoding import Round, Rounds
from benchmarks.lib.roofline import Machine, middle
from benchmarks.lib.tenants import QUIET, PhaseGaps

DECODING_HEADER = ("engine", "adapters", "tok/s", "from - to", "of base only", "bound", "ms per step",
                   "of read bandwidth", "ratio")  # fmt: skip
BASE_HEADER = ("engine", "tok/s without adapters", "tok/s with adapters loaded", "with / without", "from - to")
TENANTS_HEADER = ("engine", "phase of A", "it took ms", "gaps of B", "median ms", "p99 ms", "longest ms",
                  "longest / median before")  # fmt: skip


def without(engine: str) -> str:
    """Return the name of the server of this engine that has no adapters."""
    return f"{engine} without adapters"


@dataclass
class Results:
    """All that was measured, by server. step_bytes: that a decode step reads without adapters. adapter_bytes: of one
    adapter. rounds: by number of distinct adapters, in order. probes: of the machine."""

    step_bytes: int
    adapter_bytes: int
    rounds: dict[str, dict[int, list[Round]]] = field(default_factory=dict)
    tenants: dict[str, list[PhaseGaps]] = field(default_factory=dict)
    probes: list[Machine] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def of(self, server: str, adapters: int) -> Rounds | None:
        """Return the rounds of a server; None if there are none, or one of them has no figures."""
        found = tuple(self.rounds.get(server, {}).get(adapters, ()))
        return Rounds(found) if found and all(each.step_s for each in found) else None

    @property
    def engines(self) -> list[str]:
        """The engines with adapters, in order. The first one is the base of the ratios between engines."""
        return [name for name, counts in self.rounds.items() if set(counts) != {0}]

    @property
    def read(self) -> float | None:
        """Bytes per second that the machine reads; None without a probe."""
        machine = middle(self.probes)
        return None if machine is None else machine.read

    def bound(self, base: Rounds, adapters: int) -> float | None:
        """Return the ratio to ``base`` of a step that takes longer only by the time to read its adapters."""
        if self.read is None:
            return None
        return base.step_s / (base.step_s + adapters * self.adapter_bytes / self.read)

    def share(self, rounds: Rounds, adapters: int) -> float | None:
        """Return the share of the read bandwidth: (step_bytes + bytes of the distinct adapters) / step / read."""
        if self.read is None:
            return None
        return (self.step_bytes + adapters * self.adapter_bytes) / rounds.step_s / self.read

    def decoding_rows(self) -> list[tuple[str, ...]]:
        """Return a row per engine and number of adapters; see DECODING_HEADER. ratio: tokens per second, first engine
        over this one."""
        rows = []
        for engine in self.engines:
            base = self.of(engine, 0)
            for adapters in sorted(self.rounds[engine]):
                found, first = self.of(engine, adapters), self.of(self.engines[0], adapters)
                if found is None or base is None:
                    rows.append((engine, str(adapters), *"-" * 7))
                    continue
                rows.append(
                    (
                        engine,
                        str(adapters) if adapters else "base only",
                        f"{found.tokens_per_s:.1f}",
                        f"{min(found.speeds):.1f} - {max(found.speeds):.1f}",
                        _text(found.over(base), ".3f"),
                        _text(self.bound(base, adapters), ".3f"),
                        f"{1e3 * found.step_s:.1f}",
                        _text(self.share(found, adapters), ".0%"),
                        _text(first.over(found) if first else None, ".2f"),
                    )
                )
        return rows

    def base_rows(self) -> list[tuple[str, ...]]:
        """Return a row per engine about base requests with and without adapters in the server; see BASE_HEADER."""
        rows = []
        for engine in self.engines:
            loaded, plain = self.of(engine, 0), self.of(without(engine), 0)
            if loaded is None or plain is None:
                rows.append((engine, *"-" * 4))
                continue
            ratios = loaded.ratios(plain)
            speeds = f"{plain.tokens_per_s:.1f}", f"{loaded.tokens_per_s:.1f}"
            rows.append((engine, *speeds, _text(loaded.over(plain), ".3f"), f"{min(ratios):.3f} - {max(ratios):.3f}"))
        return rows

    def tenant_rows(self) -> list[tuple[str, ...]]:
        """Return a row per engine and phase; see TENANTS_HEADER."""
        rows = []
        for engine, phases in self.tenants.items():
            before = next(found.median for found in phases if found.phase == QUIET)
            for found in phases:
                times = (found.median, found.p99, found.longest)
                took = "-" if found.is_quiet else f"{1e3 * found.took_s:.1f}"
                cells = (f"{1e3 * value:.1f}" for value in times)
                relative = f"{found.longest / before:.2f}" if before else "-"
                rows.append((engine, found.phase, took, str(len(found.gaps)), *cells, relative))
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "step_bytes": self.step_bytes,
            "adapter_bytes": self.adapter_bytes,
            "probes": [found._asdict() for found in self.probes],
            "decoding": {
                server: {
                    str(adapters): {
                        "rounds": [asdict(found) for found in rounds],
                        **self._summary(server, adapters),
                    }
                    for adapters, rounds in counts.items()
                }
                for server, counts in self.rounds.items()
            },
            "tenants": {engine: [found.to_json() for found in phases] for engine, phases in self.tenants.items()},
            "errors": self.errors,
        }

    def _summary(self, server: str, adapters: int) -> dict[str, float | None]:
        found, base, first = self.of(server, adapters), self.of(server, 0), self.of(next(iter(self.rounds)), adapters)
        if found is None:
            return {}
        return {
            "tokens_per_s": found.tokens_per_s,
            "step_s": found.step_s,
            "of_base": found.over(base) if base else None,
            "bound": self.bound(base, adapters) if base else None,
            "of_read_bandwidth": self.share(found, adapters),
            "first_engine_over_this": first.over(found) if first else None,
        }


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
