"""What a picture of any room must have."""

from __future__ import annotations

from matplotlib.figure import Figure

from deepnmt import plots


def check(figure: Figure, named: str = "xy") -> None:
    """A title, the width, words at its axes (`named`: at which), and lines that differ by more than colour."""
    assert figure.get_suptitle() and figure.get_figwidth() == plots.WIDTH
    axes = [axes for axes in figure.axes if axes.get_visible()]
    for axis in named:
        assert any([getattr(figure, f"get_sup{axis}label")(), *(getattr(a, f"get_{axis}label")() for a in axes)])
    for each in axes:
        lines = [line for line in each.get_lines() if line.get_label() and not line.get_label().startswith("_")]
        assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines)
