"""The plots are made of the runs."""

from __future__ import annotations

import pytest

from benchmarks.lib.ways.plots import write_plots
from benchmarks.lib.ways.record import CONTROL, WAYS, read
from support.sync_run import MadeUpRun

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_each_plot_is_a_picture_and_shows_the_difference_between_runs(tmp_path):
    def pictures(name: str, **fields) -> dict[str, bytes]:
        runs = [MadeUpRun(way, seed, **fields) for way in WAYS for seed in range(2)] + [
            MadeUpRun(CONTROL, mismatch=0.5)
        ]
        folder = tmp_path / name
        paths = write_plots([read(made.write(folder / str(i))) for i, made in enumerate(runs)], folder)
        return {name: path.read_bytes() for name, path in paths.items()}

    first, again, longer = pictures("first"), pictures("again"), pictures("longer", updates=6)
    assert len(first) == 4 and all(picture.startswith(PNG) for picture in first.values())
    assert first == again, "the same runs give the same files"
    assert all(first[name] != longer[name] for name in first)
