"""Language models of several depths: every system reads the same tokens, and a run that is there is not made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepnmt.errors import UserError
from studies import lm_depth
from studies.lm_depth import PLAIN, SYSTEMS, plot, study
from studies.runs import json_lines


def test_runs_are_made_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_depth, "VOCAB", 120)
    text, output = tmp_path / "text", tmp_path / "runs.jsonl"
    text.write_text("".join(f"the {n} dogs and the {n % 7} cats sing in the garden {n * n}\n" for n in range(150)))

    def run(seeds: int) -> str:
        return study(str(text), str(text), output, updates=4, seeds=seeds, depths=[2], rate=1e-3, seconds=1e9)

    run(seeds=1)
    first = output.read_text(encoding="utf-8")
    rows = run(seeds=2).splitlines()[2:]
    assert output.read_text(encoding="utf-8").startswith(first)
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [record["system"] for record in records] == [*SYSTEMS, PLAIN] * 2
    for seed in (1, 2):
        assert len({record["tokens"] for record in records if record["seed"] == seed}) == 1
    assert all([update for update, _ in record["curve"]] == [1, 2, 3, 4] for record in records)
    assert len(rows) == 4 and all(row.count("±") == 1 for row in rows)
    made = records[0]
    monkeypatch.setattr(lm_depth, "measure", lambda recipe, system: {**made, "system": system, "bits_per_byte": 99.0})
    text.write_text(text.read_text()[:-200], encoding="utf-8")
    with pytest.raises(UserError, match="have changed since"):
        run(seeds=1)
    shutil.rmtree(tmp_path / "lm_depth")
    rows = run(seeds=1).splitlines()[2:]
    assert len(rows) == 4 and all("| 99.000 | 99.000 |" in row for row in rows), "those of the other text are left out"
    output.write_text(json_lines(records), encoding="utf-8")
    plot(output, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 10_000
