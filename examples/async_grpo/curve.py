"""Draw the learning curves of several runs: ``python -m examples.async_grpo.curve OUT.png RUN/events.jsonl ...``

Above: held-out accuracy over minutes, one line for each run. Below: reward of the sampled answers. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SMOOTHED = 10  # updates of the moving mean of the reward


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a run by kind, without the rollouts."""
    events: dict[str, list[dict[str, Any]]] = {}
    with path.open() as lines:
        for event in map(json.loads, lines):
            if event["kind"] != "rollout":
                events.setdefault(event["kind"], []).append(event)
    return events


def smoothed(values: list[float]) -> list[float]:
    """Return the mean of each value and those before it, up to SMOOTHED of them."""
    windows = (values[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw(paths: list[Path], out: Path) -> None:
    """Write the picture."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    for path in paths:
        events = read(path)
        label = f"seed {events['run'][0]['seed']}"
        evaluations, updates = events.get("eval", []), events.get("update", [])
        above.plot([e["t"] / 60 for e in evaluations], [100 * e["solved"] / e["problems"] for e in evaluations],
                   marker="o", markersize=3, label=label)  # fmt: skip
        below.plot([u["t"] / 60 for u in updates], smoothed([u["reward_all"] for u in updates]), label=label)
        above.axhline(100 * events["run"][0]["settings"]["target"], color="gray", linewidth=0.8, linestyle="--")
    above.set(ylabel="held-out problems solved, %", ylim=(0, 100), title="Asynchronous GRPO on two CPU cores")
    below.set(ylabel="reward", xlabel="minutes", ylim=(0, 1))
    above.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the learning curves of several runs.")
    parser.add_argument("out", type=Path, help="picture to write")
    parser.add_argument("runs", type=Path, nargs="+", help="events.jsonl of each run")
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)


if __name__ == "__main__":
    main()
