"""The papers' figures, at a small size and as documented."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from deepnmt.extras.doctor.measures import Gradients
from studies.__main__ import main
from studies.papers import EXPERIMENTS, MIN_LAYERS, Small, gradient_factors, reproduce


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_papers_in_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.papers._UPDATES", 20)
    text = reproduce(name, tmp_path, Small(width=8, sentences=2, trials=2, deepest=MIN_LAYERS[name]))
    results = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    if name == "corollaries":
        assert results["growth"]["pre_ln"]["depths"] == [1, 2, 3]
    elif name == "vanishing":
        first = results["gradients"]["post_ln"][0]
        assert len(first["places"]) == 2 and len(results["gradients"]["post_ln"]) == 2
        factors = results["factors"]
        steps = ["norm after the FFN", "FFN", "norm after cross-attention", "cross-attention",
                 "norm after self-attention", "self-attention"]
        assert list(factors)[3:] == steps
        outputs = {name: value for name, value in first["outputs"].items() if name.startswith("decoder.")}
        seed = gradient_factors(Gradients(0.0, outputs, {}, first["places"]))
        for place, name in enumerate(list(factors)[:2]):  # norm times residual sum gives the sub-layer
            assert seed[name] == pytest.approx(seed[steps[2 * place]] * seed[steps[2 * place + 1]])
        below, above = outputs["decoder.layers.0.ffn"], outputs["decoder.layers.1.self_attn"]
        assert seed["output of self-attention to that of the FFN below"] == pytest.approx(below / above)
        assert seed["self-attention"] == pytest.approx(below / first["places"]["decoder.layers.1"][0])
    elif name == "places":
        [(layer, norms)] = results["norms"].items()
        assert layer == "decoder layer 1" and len(norms) == 5 and all(norms)
    elif name == "similarity":
        square = results["cosines"]["post_ln decoder"]
        assert len(results["cosines"]) == 6 and square[0][0] == pytest.approx(1) and square[0][1] == square[1][0] < 1
    elif name == "warmup":
        assert [len(row) for row in results["finals"]["pre_ln"]] == [5] * 3 and "admin" not in text
        assert results["finals"]["post_ln"][2][0] != results["finals"]["post_ln"][2][4], "the warm-up has an effect"
    elif name == "optimizers":
        for rows in results["finals"].values():  # rates, β2, seeds
            assert [len(row) for row in rows] == [5] * 3 and {len(seeds) for row in rows for seeds in row} == {2}
        assert all(f"{block}: " in text for block in ("post_ln", "pre_ln", "admin"))
        assert results["finals"]["post_ln"][0][0] != results["finals"]["post_ln"][0][4], "β2 has an effect"
    elif name == "unbalanced":
        for kind in ("gradients", "updates"):
            values = [pair[kind] for pair in results["pairs"]]
            assert len(values) == 16 and all(max(norms.values()) == 1 for norms in values)
            assert len(values[0]) == 12  # four matrices of three attentions
        assert "pre_ln" not in text and "encoder self_attn: gradients q " in text
    else:
        assert results["depths"] == [2, 4, 6] and results["norms"]["pre_ln"][0] > 0
        assert math.isfinite(results["power"]["pre_ln"])


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="two minutes of one core; DEEPNMT_LONG=1 runs it")
def test_papers_as_documented(tmp_path: Path) -> None:
    """The commands of studies/results/papers.md give the papers' results."""
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
