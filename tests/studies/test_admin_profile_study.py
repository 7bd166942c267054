"""Profiles beside the published one: the table, the picture, and the output change against a model's own β."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from refusals import user_error

from deepnmt.config import Model
from deepnmt.extras.doctor.measures import dependency
from deepnmt.extras.doctor.variants import fresh_model
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.processes.ranks import Ranks
from studies.__main__ import main
from studies.admin_profile import compare_profiles, differences, output_changes, published
from studies.benchmarks.gpu_measure import random_batch


def saved(path: Path, omega: dict[str, list[float]], width: int = 512, **provenance: Any) -> Path:
    """A profile of 100L-100L, or of as many layers as `omega` has."""
    layers = {"encoder": len(omega["encoder"]) // 2, "decoder": len(omega["decoder"]) // 3}
    model = Model.model_validate({"width": width, **{side: {"layers": count} for side, count in layers.items()}})
    path.parent.mkdir(exist_ok=True)
    AdminProfile(omega["encoder"], omega["decoder"], {"model": model.model_dump(), **provenance}).save(path)
    return path


def test_the_published_values_are_whole() -> None:
    omega = published()
    assert {side: (len(values), values[0], values[1], values[-1]) for side, values in omega.items()} == {
        "encoder": (200, 1.0, 1.319, 8.836), "decoder": (300, 1.0, 1.3426, 11.2496)}
    for values in omega.values():  # a wrong digit would make a variance that no branch has
        assert all(0.1 < high**2 - low**2 < 0.75 for low, high in pairwise(values[1:]))


def test_profiles_of_width_512_are_compared_with_the_published_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {side: list(values) for side, values in published().items()}
    higher = {side: [1.0, *(1.02 * value for value in values[1:60])] for side, values in known.items()}
    files = [saved(tmp_path / "a" / "p.json", known, method="in_place"),
             saved(tmp_path / "b" / "p.json", higher),
             saved(tmp_path / "c" / "p.json", known, method="in_place", count_padding=True)]
    assert main("admin-profile", [*map(str, files), "--output", str(tmp_path / "p.png")]) == 0
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["in_place", "encoder, 200", "1.319", "6.162", "8.836", "+0.00", "+0.00"]
    assert rows[4] == ["separate", "decoder, 60", "1.369", "3.682", "5.139", "+1.97", "+2.00"]
    assert rows[5][0] == "in_place, padding counted"
    assert (tmp_path / "p.png").stat().st_size > 20_000


def test_the_output_change_is_that_of_the_models_own_dependency(tmp_path: Path) -> None:
    model = Model.model_validate({"width": 64, "heads": 4, "ffn": 128, "dropout": 0.0,
                                  "encoder": {"layers": 12}, "decoder": {"layers": 1}})
    batch = random_batch(8, 20, 50, 1, Ranks.alone())
    transformer = fresh_model(model, 50, 50, 1, [batch])
    omega = [weight[0].item() for layer in transformer.encoder.layers for weight in layer.rule.omegas]
    beta = dependency(transformer, batch, "encoder")
    measured = output_changes(omega)
    assert len(measured) == len(omega) - 2
    assert measured[-1] == pytest.approx(sum(beta[i][i] ** 2 for i in range(2, len(omega))), rel=0.02)
    file = saved(tmp_path / "p.json", {"encoder": omega, "decoder": [1.0, 1.5, 2.0]}, width=64, method="in_place")
    text = compare_profiles([file], tmp_path / "p.png")
    assert "Σ β_ii²" in text and "encoder, 24" in text and "decoder" not in text.splitlines()[1]


def test_differences_are_of_common_sub_layers() -> None:
    assert differences([1.0, 2.0, 3.0], [1.0, 1.6]) == pytest.approx([0.0, 25.0])


def test_a_file_without_its_model_is_refused(tmp_path: Path) -> None:
    with user_error("there is no file"):
        compare_profiles([tmp_path / "none.json"], tmp_path / "p.png")
    (tmp_path / "p.json").write_text("{}")
    with user_error("is no profile with its model; give an admin_profile.json"):
        compare_profiles([tmp_path / "p.json"], tmp_path / "p.png")
