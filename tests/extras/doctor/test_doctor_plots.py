"""The axes and labels of the doctor's pictures."""

from __future__ import annotations

import math
from pathlib import Path

import pictures
import pytest
from matplotlib.figure import Figure

from deepnmt.extras.doctor import plots
from deepnmt.extras.doctor.measures import Growth

PATH = Path("picture.png")
GROWTH = Growth.of([1, 2, 4], [0.1, 0.2, 0.4])
PICTURES = {
    "squares": lambda: plots.plot_similarity({"encoder": [[1.0, 0.5], [0.5, 1.0]], "decoder": [[1.0]]}, PATH),
    "growth": lambda: plots.plot_growth({"noise": {"encoder": GROWTH}, "update": {"encoder": GROWTH}}, PATH, "title"),
    "lines": lambda: plots.plot_lines({"encoder": {"a": [5.0, 2.5], "b": [4.0, 3.0]}}, PATH, title="title",
                                      xlabel="layer", ylabel="norm"),
    "half": lambda: plots.plot_half({"scale": 1.0, "shares": {"encoder": 0.1}, "shares_fp32": {"encoder": 0.0}}, PATH),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_title_and_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, _path: figures.append(figure))
    PICTURES[name]()
    [figure] = figures
    pictures.check(figure, "y" if name == "half" else "xy")  # which has words as ticks


def test_a_logarithmic_axis_spans_a_decade_around_its_values() -> None:
    for values, widened in (([0.5, 0.6], True), ([1e-4, 3.0], False)):
        axes = Figure().add_subplot()
        axes.plot(values)
        axes.set_yscale("log")
        before = axes.get_ylim()
        plots.mark_decades([axes])
        low, high = axes.get_ylim()
        assert low < min(values) < max(values) < high and high / low >= 10 - 1e-9
        assert ((low, high) != before) == widened
        assert abs(low * high / (before[0] * before[1]) - 1) < 1e-6  # the middle of the axis stays


def test_layers_are_counted_from_1(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, _path: figures.append(figure))
    shares = dict.fromkeys(("encoder.layers.0", "decoder.layers.11", "embeddings"), 0.5)
    plots.plot_half({"scale": 1.0, "shares": shares, "shares_fp32": shares}, Path())
    labels = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert labels == ["encoder 1", "decoder 12", "embeddings"]


def test_the_course_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each recipe in each of four pictures; what is not finite is left out."""
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, _path: figures.append(figure))
    points = [{"update": update, "encoder_common": 0.1 * update, "cross_attention_entropy": 1.0, "source_gain": -0.1,
               "decoder_common": 0.0} for update in (0, 10)]
    plots.plot_trial({"this recipe": {"losses": [3.0, 2.0, math.inf], "source": points},
                      "optimizer.lr=0.1": {"losses": [3.0], "source": points[:1]}}, Path())
    lines = [[(line.get_label(), [*map(float, line.get_ydata())]) for line in axes.get_lines()]
             for axes in figures[0].axes]
    assert lines == [[("this recipe", [0.0, 1.0]), ("optimizer.lr=0.1", [0.0])],
                     [("this recipe", [1.0, 1.0]), ("optimizer.lr=0.1", [1.0])],
                     [("this recipe", [-0.1, -0.1]), ("optimizer.lr=0.1", [-0.1])],
                     [("this recipe", [3.0, 2.0]), ("optimizer.lr=0.1", [3.0])]]
