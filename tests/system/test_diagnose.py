"""The doctor through its command line: a recipe before training, a run's checkpoint, and the papers in small."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnmt.diagnose
from deepnmt.analysis.admin_profile import AdminProfile
from deepnmt.analysis.gradient_probe import Gradients
from deepnmt.cli import main
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.settings import open_prepared
from deepnmt.diagnose import _alternatives, _patient, first_batch
from deepnmt.parallel.launch import Ranks
from deepnmt.profile import profile_for
from deepnmt.reproduce import LEAST_DEEP, Small, reproduce, way_down

ONE = "parallel.threads=1"
LAYOUTS = Path(__file__).parents[2] / "ds_configs"
PICTURES = {"dependency", "change", "gradients", "matrices", "places", "likeness", "ranges", "half"}


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "diagnosis.json").read_text()))


def write_rule(folder: Path, weight: float) -> str:
    """A rule that asks for the rate alone: `weight` below 0 wants it low."""
    rule = {"format": "deepnmt-verdict", "version": 2, "kind": "logistic", "names": ["rate"],
            "body": {"centre": [-3.15], "scale": [0.3], "weights": [weight], "squares": [0.0], "bias": 0.0},
            "spans": {"rate": [-5, -3]}, "facts": {}}
    (folder / "rule.json").write_text(json.dumps(rule))
    return str(folder / "rule.json")


def test_a_recipe_before_training(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "--tokens", "100", ONE]
    assert main("diagnose", [*words, "--rule", write_rule(tmp_path, -5.0)]) == 0
    said, folder = capsys.readouterr().out, tmp_path / "diagnosis"
    assert re.search(r"^verdict +(trains|does NOT train) \(probability 0\.\d\d\)", said, flags=re.MULTILINE)
    found = read(folder)
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"last_ffn"}
    page = (folder / "diagnosis.html").read_text()
    assert page.count("data:image/png;base64,") == 9 and "http" not in page.replace("http-equiv", "")
    assert len(found["dependency"]["decoder"]) == 3 * 2 + 1 and len(found["likeness"]["encoder"]) == 2
    assert found["growth"].keys() == {"1 % noise on the matrices", "one update at the peak rate 0.005"}
    assert found["last_ffn"]["depths"] == [1, 2] and all(math.isfinite(n) for n in found["last_ffn"]["norms"])
    assert found["change"]["update"]["loss_after"] != found["change"]["update"]["loss_before"]
    assert found["about"]["sentences"] >= 2 and found["about"]["target tokens"] <= 100
    assert set(found["verdict"]["instead"]) == set() or not found["verdict"]["trains"]


def test_a_verdict_of_no_tries_other_recipes(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepnmt.diagnose, "LOST", -1.0)  # fp16 fails, whatever it loses
    words = [str(prepared / "recipe.yaml"), f"run={tmp_path}", "schedule.warmup=0", ONE, "--tokens", "60"]
    fp16 = f"parallel.ds_config={LAYOUTS}/zero1_fp16.json"
    assert main("diagnose", [*words, fp16, "--rule", write_rule(tmp_path, -9.0)]) == 0
    verdict = read(tmp_path / "diagnosis")["verdict"]
    assert re.search(r"^verdict +does NOT train in fp16: \d+ % of a layer's gradients are lost to fp16 at loss scale "
                     r"8192 \(probability in another precision 0\.", capsys.readouterr().out, flags=re.MULTILINE)
    assert verdict["instead"][f"parallel.ds_config={LAYOUTS}/zero1_bf16.json"] == verdict["probability"]
    assert not verdict["trains"] and verdict["probability"] < 0.5 and len(verdict["outside"]) == 1
    assert verdict["instead"]["optimizer.lr=0.0005"] > 0.9 > 0.5 > verdict["instead"]["schedule.warmup=1"]
    assert {"model.encoder.block=pre_ln model.decoder.block=pre_ln",
            "model.encoder.init=depth_scaled model.decoder.init=depth_scaled"} <= verdict["instead"].keys()


def test_larger_batches_and_initialisations_are_tried_where_they_differ(prepared: Path) -> None:
    recipe = load_recipe(prepared / "recipe.yaml", ["batch.accumulation=2", "model.encoder.block=b2t",
                                                    "model.decoder.init=depth_scaled"])
    assert _alternatives(recipe, True)["batch.accumulation=8"].batch.accumulation == 8
    assert not any("accumulation" in name or "init" in name for name in _alternatives(recipe, False))


def test_the_model_starts_from_the_profile_that_the_run_would(prepared: Path, tmp_path: Path) -> None:
    odd = AdminProfile([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5, 5.5, 6.5], {})
    odd.save(tmp_path / "odd.json")
    ours = load_recipe(prepared / "recipe.yaml", [f"admin.profile={tmp_path}/odd.json"])
    data = open_prepared(ours)
    looked_at = first_batch(ours, data, 60, torch.device("cpu"))

    def omegas(recipe: Recipe) -> list[float]:
        model = _patient(recipe, data, looked_at, None).model
        return [float(tensor[0]) for name, tensor in model.named_parameters() if ".omegas." in name]

    assert omegas(ours) == [*odd.encoder, *odd.decoder]
    measured = load_recipe(prepared / "recipe.yaml")
    begun = profile_for(measured, data, Ranks(0, 1, 0, 1, torch.device("cpu")))  # on admin.tokens, not on the batch
    assert begun is not None and omegas(measured) == pytest.approx([*begun.encoder, *begun.decoder])


def test_a_run_and_its_checkpoints(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "train.updates=6", "train.valid_bleu=false",
                          "train.probe_every=2", ONE]) == 0
    assert main("diagnose", [str(run), "--tokens", "60", ONE]) == 0
    said = capsys.readouterr().out
    folder = run / "diagnosis-update-00000006"
    found = read(folder)
    assert "verdict" not in found and "verdict" not in said
    assert main("diagnose", [str(run), "optimizer.lr=1e-3", ONE]) == 2
    assert "optimizer.lr=1e-3 has no say here, since " in capsys.readouterr().err
    assert {file.stem for file in folder.glob("*.png")} == PICTURES | {"moved"}
    assert (found["moved"][0]["update"], found["moved"][-1]["until"]) == (3, 6)
    assert max(found["moved"][0]["updates"].values()) == 1.0
    assert found["about"]["checkpoint"].endswith("update-00000006")
    monkeypatch.setattr(deepnmt.diagnose, "SHIPPED", tmp_path / "none.json")
    assert main("diagnose", [str(run), "--fresh", "--tokens", "60", ONE]) == 0
    assert read(run / "diagnosis")["verdict"] is None and "no rule comes with this version" in capsys.readouterr().out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("probe/")]
    assert len(tags) == 4 * 4
    points = board.Scalars("probe/decoder.layers.1/gradient_norm")
    assert [p.step for p in points] == [2, 4, 6] and all(p.value > 0 for p in points)


@pytest.mark.parametrize("name", ["corollaries", "vanishing", "last_ffn"])
def test_papers_in_small(name: str, tmp_path: Path) -> None:
    text = reproduce(name, tmp_path, Small(width=8, sentences=2, trials=2, deepest=LEAST_DEEP[name]))
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").stat().st_size > 5000 and "post_ln" in text
    if name == "corollaries":
        assert found["growth"]["pre_ln"]["depths"] == [1, 2, 3]
    elif name == "vanishing":
        first = found["gradients"]["post_ln"][0]
        assert len(first["places"]) == 2 and len(found["gradients"]["post_ln"]) == 2
        factors = found["factors"]
        steps = ["norm after the FFN", "FFN", "norm after cross-attention", "cross-attention",
                 "norm after self-attention", "self-attention"]
        assert list(factors)[3:] == steps
        outputs = {name: value for name, value in first["outputs"].items() if name.startswith("decoder.")}
        seed = way_down(Gradients(0.0, outputs, {}, first["places"]))
        for place, name in enumerate(list(factors)[:2]):  # a sub-layer's factor is its norm's times its sum's
            assert seed[name] == pytest.approx(seed[steps[2 * place]] * seed[steps[2 * place + 1]])
        below, above = outputs["decoder.layers.0.ffn"], outputs["decoder.layers.1.self_attn"]
        assert seed["output of self-attention to that of the FFN below"] == pytest.approx(below / above)
        assert seed["self-attention"] == pytest.approx(below / first["places"]["decoder.layers.1"][0])
    else:
        assert found["depths"] == [2, 4, 6] and found["norms"]["pre_ln"][0] > 0
        assert math.isfinite(found["power"]["pre_ln"])


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="two minutes of one core; DEEPNMT_LONG=1 runs it")
def test_papers_as_documented(tmp_path: Path) -> None:
    """The commands of docs/results.md, and what the papers say comes of them."""
    for words in ("corollaries --width 128 --sentences 4 --trials 9", "vanishing", "last_ffn"):
        assert main("reproduce", [*words.split(), "--output", str(tmp_path)]) == 0
    grown, vanished, last = (json.loads((tmp_path / f"{name}.json").read_text())
                             for name in ("corollaries", "vanishing", "last_ffn"))
    law = {block: growth["linear" if block == "post_ln" else "logarithmic"]["r2"]
           for block, growth in grown["growth"].items()}
    assert law.keys() == {"post_ln", "pre_ln", "admin"} and min(law.values()) >= 0.95
    ratios = vanished["lowest_over_highest"]
    assert ratios["post_ln"]["decoder"] < 0.1 < min(r["decoder"] for block, r in ratios.items() if block != "post_ln")
    assert min(ratio["encoder"] for ratio in ratios.values()) > 0.9
    over_sublayers = list(vanished["factors"].values())[:3]
    assert over_sublayers == pytest.approx([1.0, 0.82, 1.0], abs=0.03)
    assert last["power"] == pytest.approx({"post_ln": 0.0, "pre_ln": -0.5}, abs=0.1)


def test_mistakes(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(prepared / "recipe.yaml")
    assert main("diagnose", [recipe, f"run={tmp_path}", "--checkpoint", str(tmp_path / "none")]) == 2
    assert main("diagnose", [recipe, f"run={tmp_path}", "--tokens", "0"]) == 2
    assert main("diagnose", [recipe, f"run={tmp_path}", "--rule", str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err
    assert "there is no folder" in said and "--tokens is 0" in said and "none.json cannot be read" in said
