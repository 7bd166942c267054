"""Long runs of a plan: one record for each, and a plan that goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from refusals import Refused, Tool

from deepnmt.errors import UserError
from studies import long_runs
from studies.__main__ import main
from studies.long_runs import Plan, read_plan, report
from studies.scores import bleu, pack, unpack, with_totals

ROOT = Path(__file__).parents[2]


def test_a_plan_is_trained_to_its_end_and_goes_on(
        prepared: Path, study: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"""
recipe: {prepared / "recipe.yaml"}
seeds: [3]
arms:
  shallow: [train.updates=6, model.encoder.layers=1]
""", encoding="utf-8")
    words = [str(plan), "translate.beam=1", "--runs", str(tmp_path / "runs.jsonl"), "--output", str(tmp_path / "runs")]
    assert main("long-runs", [*words, "--seconds", "0"]) == 0
    assert "1 of 1 runs are missing" in capsys.readouterr().out
    done = study("long-runs", *words)
    assert done.returncode == 0 and "0 of 1 runs are missing" in done.stdout, done.stderr
    record = json.loads((tmp_path / "runs.jsonl").read_text(encoding="utf-8"))
    assert (record["arm"], record["seed"], record["updates"]) == ("shallow", 3, 6)
    assert record["settings"] == ["train.updates=6", "model.encoder.layers=1", "translate.beam=1"]
    assert [point[0] for point in record["training"]] == list(range(1, 7)) and record["cpu_seconds"] > 0
    assert [validation["update"] for validation in record["validations"]] == [5, 6]
    assert f"; {record['cpu_seconds'] / 3600:.2f} CPU hours" in done.stderr
    assert len(record["layers"]["decoder"]["together"]) == 2
    [score] = record["tests"].values()
    assert bleu(with_totals(unpack(score["counts"])).sum(axis=0)) == pytest.approx(score["bleu"], abs=0.01)
    assert main("long-runs", [*words, "--report", "--plot", str(tmp_path / "curves.png")]) == 0
    said = capsys.readouterr().out
    assert f"| shallow | 1 | {score['bleu']:.1f}, {score['chrf']:.1f} |" in said and "| shallow | decoder | 1 |" in said
    assert (tmp_path / "curves.png").stat().st_size
    assert main("long-runs", words) == 0
    assert len((tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    for old, new in (("updates=6", "updates=7"), (str(prepared / "recipe.yaml"), str(tmp_path / "other.yaml"))):
        (tmp_path / "other" / "plan.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / "other" / "plan.yaml").write_text(plan.read_text(encoding="utf-8").replace(old, new), "utf-8")
        assert "has a run of shallow with another recipe, other settings or other data" in refused(
            "long-runs", tmp_path / "other" / "plan.yaml", *words[1:])
    (tmp_path / "runs.jsonl").unlink()  # as if the study had been stopped before, whose seconds nobody has counted
    monkeypatch.setattr(long_runs, "deepnmt", lambda *words: 1.0)  # has nothing left to do
    assert main("long-runs", words) == 0
    again = json.loads((tmp_path / "runs.jsonl").read_text(encoding="utf-8"))
    measured = [one.pop("layers")["decoder"]["worth"] for one in (record, again)]
    assert again == {**record, "cpu_seconds": None}
    assert measured[1] == pytest.approx(measured[0], abs=1e-5)  # this process may have other threads
    assert main("long-runs", [*words, "--report"]) == 0 and "| unknown |" in capsys.readouterr().out


def test_only_runs_with_the_plans_settings_count(
        prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, runs = tmp_path / "recipe.yaml", tmp_path / "runs.jsonl"
    recipe.write_text((prepared / "recipe.yaml").read_text(encoding="utf-8"), encoding="utf-8")

    def trained(plan: Plan, arm: str, seed: int, run: Path, settings: list[str]) -> dict[str, Any]:
        return {"arm": arm, "seed": seed, "recipe": str(plan.recipe), "settings": [*plan.arms[arm], *settings],
                "cpu_seconds": 1.0, "tests": {}}

    monkeypatch.setattr(long_runs, "train_one", trained)

    def take(own: list[str], *machine: str) -> str:
        return long_runs.run_plan(Plan(recipe, {"deep": own}, [1], []), runs, tmp_path, [*machine], 60)

    own = ["optimizer.lr=0.01", "model.ffn=48"]
    assert take(own, "parallel.precision=bf16") == take(own) == "0 of 1 runs are missing"
    assert len(runs.read_text(encoding="utf-8").splitlines()) == 1
    for others in (own[:1], own[1:], own[::-1]):
        with pytest.raises(UserError, match="has a run of deep with another recipe, other settings or other data"):
            take(others)
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("clip: 1.0", "clip: 2.0"), encoding="utf-8")
    with pytest.raises(UserError, match="has a run of deep with another recipe"):
        take(own)
    [record] = [json.loads(line) for line in runs.read_text(encoding="utf-8").splitlines()]
    del record["fingerprint"]  # as in older lines
    runs.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert take(own) == "0 of 1 runs are missing"
    # a text that the command line names is that of the runs
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    folder = f"data.folder={tree['data']['folder']}"
    recipe.write_text(yaml.safe_dump({**tree, "data": {**tree["data"], "folder": "nowhere"}}), encoding="utf-8")
    runs.unlink()
    assert take(own, folder, "parallel.precision=bf16") == take(own, folder) == "0 of 1 runs are missing"


@pytest.mark.parametrize("plan", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda plan: plan.stem)
def test_a_plan_takes_the_runs_that_were_made_of_it(plan: Path) -> None:
    file, arms = plan.with_name(f"{plan.stem}_runs.jsonl"), read_plan(plan).arms
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    known = [record for record in records if record["arm"] in arms]
    assert known
    for record in known:
        own = arms[record["arm"]]
        assert record["settings"][:len(own)] == own, record["arm"]


def test_all_arms_with_the_first_seed_come_before_the_second() -> None:
    plan = Plan(Path("recipe.yaml"), {"deep": [], "shallow": []}, [1, 2], ["shallow"])
    assert list(plan.runs()) == [("deep", 1), ("shallow", 1), ("deep", 2)]


def test_the_report_has_means_deviations_and_what_is_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "runs.jsonl"
    counts = np.tile([20, 20, 15, 12, 9, 6], (50, 1))
    better = np.tile([20, 20, 18, 16, 14, 12], (50, 1))
    runs = [("deep", 1, counts, 30.0), ("deep", 2, counts, 31.0), ("wide", 1, better, 60.0), ("wide", 2, better, 60.0)]
    records.write_text("".join(json.dumps({
        "arm": arm, "seed": seed, "commit": "abc", "cpu_seconds": 3600 * seed,
        "validations": [{"update": 10, "perplexity": 6.0}],
        "tests": {"held_out": {"bleu": score, "chrf": 50.0, "counts": pack(of_run)}}}) + "\n"
        for arm, seed, of_run, score in runs))
    header, _, deep, wide = report(records, None).splitlines()
    assert "held_out: BLEU" in header
    assert deep == "| deep | 2 | 30.5 ± 0.7, 50.0 ± 0.0 | 6.00 ± 0.00 | 1.50 ± 0.71 | abc |  |"
    gain = bleu(with_totals(better).sum(axis=0)) - bleu(with_totals(counts).sum(axis=0))
    assert wide.split(" | ")[-1].startswith(f"{gain:+.2f}, ") and float(wide.split(", ")[-1].strip("| ")) < 0.01
    assert report(records, None, ["wide=Six layers"]).splitlines()[2].startswith("| Six layers | 2 | 60.0")
    _, _, wide, deep = report(records, None, ["wide", "deep"]).splitlines()
    assert deep.split(" | ")[-1].startswith(f"{-gain:+.2f}, ") and wide.endswith("|  |")
    titles: list[str] = []
    monkeypatch.setattr(long_runs, "plot_comparison", lambda curves, picture, title, *_, **more: titles.append(title))
    report(records, tmp_path / "curves.png")
    records.write_text(records.read_text(encoding="utf-8").replace('"seed": 1', '"seed": 3'), encoding="utf-8")
    report(records, tmp_path / "curves.png")
    assert titles == ["Trained to their end, seed 1", "Trained to their end, seed 3"]
    with pytest.raises(UserError, match="train some first"):
        report(tmp_path / "none.jsonl", None)
    with pytest.raises(UserError, match=r"--arms has tall, but .*runs\.jsonl has deep, wide"):
        report(records, None, ["tall"])


def test_only_a_newline_ends_a_line_of_a_test_set(tmp_path: Path) -> None:
    """A text may hold U+2028, which a translation of it need not have."""
    (tmp_path / "scores").mkdir()
    (tmp_path / "recipe.yaml").write_text("data: {trg_lang: de}\n", encoding="utf-8")
    words = "ein Haus steht am alten Weg"
    for name, first in (("test.ref", words.replace(" ", "\u2028", 1)), ("test.hyp", words)):
        (tmp_path / "scores" / name).write_text(f"{first}\nder Hund schläft im Garten\n", encoding="utf-8")
    [(name, scores)] = long_runs.test_scores(tmp_path)
    assert name == "test" and len(unpack(scores["counts"])) == 2 and scores["bleu"] > 50


def test_a_file_that_is_no_plan(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("recipe: x.yaml\n", encoding="utf-8")
    assert "arms" in refused("long-runs", tmp_path / "plan.yaml", "--runs", tmp_path / "runs.jsonl")
    assert read_plan(Path(__file__).parents[2] / "studies/deep.yaml").seeds == [1, 2, 3]
