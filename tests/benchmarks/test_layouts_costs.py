"""benchmarks/layouts.py on the embedded model: all layouts make the same weights, and each has a row."""

from __future__ import annotations

import json

from benchmarks import layouts


def test_it_reports_a_row_for_each_layout(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert layouts.main(["--repeats", "1", "--scratch", str(tmp_path), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["layouts"]
    assert [row["layout"] for row in rows] == list(layouts.KINDS) and all(row["ratio"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1 and ".pdparams" in capsys.readouterr().out
