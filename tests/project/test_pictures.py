"""All pictures have a title, named axes and the same width; lines differ by more than colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pictures
import pytest
from matplotlib.figure import Figure

from deepnmt import plots
from deepnmt.plots import plot_learning_curve  # a fixture takes it out of its module
from studies import plots as studies

CURVES = {name: [(update, 5.0 / update) for update in range(1, 9)] for name in ("post_ln", "admin")}
PANEL = studies.Panel("6L-6L", CURVES, dict.fromkeys(CURVES, "learned"), {"even guess": 8.0})
ROWS = [{"micro_batches": count, "idle": [0.5, 0.4], "mean": 0.45, "formula": 0.5, "expected": 0.4} for count in (1, 2)]
LOG = [{"type": "train", "update": 5, "loss": 3.5, "learning_rate": 1e-3},
       {"type": "valid", "update": 5, "loss": 3.0, "bleu": 12.5}]
USE = [{"update": update, "loss": 3.0, "source_gain": 0.1, "encoder_common": 0.9} for update in (1, 2)]
LOOK = {"type": "look", "update": 2, "source_gain": 0.1, "encoder_common": 0.9, "decoder_common": 0.5,
        "cross_attention_entropy": 0.8}
PATH = Path("picture.png")
PICTURES = {
    "curve": lambda: plot_learning_curve(LOG, PATH, "demo"),
    "curve with the use of the source": lambda: plot_learning_curve([*LOG, LOOK], PATH, "demo"),
    "study": lambda: studies.plot_study([PANEL, PANEL], PATH, "title"),
    "idle": lambda: studies.plot_idle_time(ROWS, 2, PATH),
    "source use": lambda: studies.plot_source_use({"run": USE}, PATH, "title"),
    "comparison": lambda: studies.plot_comparison({"a": dict(CURVES["admin"])}, PATH, "title", "loss, nats per token"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_title_and_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    for module in (plots, studies):
        monkeypatch.setattr(module, "save", lambda figure, _path: figures.append(figure))
    PICTURES[name]()
    [figure] = figures
    pictures.check(figure)


@pytest.mark.parametrize(("records", "panels"), [(LOG, 3), ([*LOG, LOOK], 5), ([], 1)])
def test_a_curve_has_a_panel_for_what_its_log_has(
        records: list[dict[str, Any]], panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, _path: figures.append(figure))
    plot_learning_curve(records, PATH, "demo")
    [figure] = figures
    assert len(figure.axes) == panels and all(axes.get_lines() for axes in figure.axes) == bool(records)


def test_styles_differ_when_colours_repeat() -> None:
    styles = [tuple(plots.style(number).values()) for number in range(len(plots.COLOURS) * len(plots.DASHES))]
    assert len(set(styles)) == len(styles)


def test_pictures_of_the_documents_are_small() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "pictures"
    assert [file.name for file in folder.glob("*.png") if file.stat().st_size >= 300_000] == []
