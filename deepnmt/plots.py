"""The common style of all pictures, and the pictures of a run: ω against depth, and the learning curve.

Matplotlib is imported only when a picture is plotted, because the import takes a second.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from deepnmt.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deepnmt.model.admin_profile import AdminProfile

# Okabe and Ito's palette, which people with any form of colour blindness can distinguish. In a grey print, dashes and
# markers distinguish the lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dv*Px"
GREY = "#666666"
WIDTH, HEIGHT = 6.25, 3.4  # inches, of a picture and of one panel; shown 600 pixels wide, a point is 4/3 of a pixel
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small"}
_RESOLUTION = 160  # dots an inch: 1,000 pixels, for sharp text on today's screens
_TITLE = 11  # points
_FEW_POINTS = 40  # a line with more points has only about `_MARKERS_OF_MANY` markers
_MARKERS_OF_MANY = 8


def plot_admin_profile(profile: AdminProfile, path: str | Path) -> None:
    """Plots ω against the sub-layer's number in its stack, and the growth published for 100L-100L of width 512."""
    figure, [axes] = panels(["Admin's initial shortcut weight ω of every sub-layer"],
                            "sub-layer k, counted from the bottom of its stack", "ω, a factor")
    stacks = {"encoder": profile.encoder, "decoder": profile.decoder}
    for number, (name, values) in enumerate(stacks.items()):
        if values:
            axes.plot(range(1, len(values) + 1), values, **style(number, len(values)),
                      label=f"{name}, {len(values)} sub-layers")
    depths = range(1, max(map(len, stacks.values())) + 1)
    axes.plot(depths, [math.sqrt(1 + 0.39 * (k - 1)) for k in depths], color=GREY, linestyle=":",
              label="√(1 + 0.39 (k − 1)): about what was published for width 512")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, **LEGEND)
    save(figure, path)


def plot_learning_curve(records: Sequence[Mapping[str, Any]], path: str | Path, run: str) -> None:
    """Plots loss, validation BLEU, how the source is used and the learning rate against updates, in panels below each
    other. What a log does not have is left out.

    Args:
        records: those of a run's `log.jsonl`; types other than "train", "valid" and "look" are ignored.
        path: the PNG to write.
        run: the run's name, for the title.
    """
    def points(kind: str, key: str) -> list[tuple[int, float]]:
        """(update, value) of the records with a finite value; logs hold NaN and infinity as text."""
        kinds = (kind, "look") if kind == "valid" else (kind,)
        values = []
        for record in records:
            if record["type"] in kinds and record.get(key) is not None:
                value = float(record[key])
                if math.isfinite(value):
                    values.append((int(record["update"]), value))
        return values

    # label of the y axis to the lines, by name
    lines = {
        "loss, nats per target token": {"training": points("train", "loss"), "validation": points("valid", "loss")},
        "validation BLEU": {"": points("valid", "bleu")},
        "source's gain, nats": {"": points("valid", "source_gain")},
        "signs of collapse": {"one vector's share: encoder": points("valid", "encoder_common"),
                              "decoder": points("valid", "decoder_common"),
                              "entropy of cross-attention": points("valid", "cross_attention_entropy")},
        "learning rate": {"": points("train", "learning_rate")},
    }
    _, *others = lines  # the loss stays, if only as empty axes
    for label in others:
        if not any(lines[label].values()):
            del lines[label]
    *first, last = [label.partition(",")[0] for label in lines]
    title = f"{', '.join(first)} and {last}" if first else last
    figure, column = panels([""] * len(lines), "update", list(lines), f"Run {run}: {title} over its updates",
                            heights=[2.6, *[1.6] * (len(lines) - 1)], share=False)
    for axes, group in zip(column, lines.values(), strict=True):
        for number, (name, values) in enumerate(group.items()):
            if values:
                axes.plot(*zip(*values, strict=True), **style(number, len(values)), label=name)
        axes.sharex(column[0])
        axes.tick_params(labelbottom=axes is column[-1])
        if axes is not column[0]:
            axes.set_ylim(bottom=0)
        if len(group) > 1 and axes.get_lines():
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(group), borderaxespad=0, **LEGEND)
    column[0].set_xlim(left=0)
    save(figure, path)


def style(number: int, points: int = 0) -> dict[str, Any]:
    """Matplotlib's settings for the colour, dashes and markers of a line.

    Args:
        number: of the line in its axes, from 0.
        points: how many points it has; with few, each has a marker, so that a single point is visible. 0: no markers.
    """
    settings: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
    if points:
        step, size = 1, 3.5
        if points > _FEW_POINTS:
            step, size = max(1, points // _MARKERS_OF_MANY), 4.5
        settings |= {"marker": MARKERS[number % len(MARKERS)], "markersize": size, "markevery": (number % step, step)}
    return settings


def panels(
    titles: Sequence[str], xlabel: str, ylabel: str | Sequence[str], title: str = "", *, share: bool = True,
    columns: int = 1, heights: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with axes for each of `titles`, row by row.

    Args:
        xlabel: for the lowest axes of each column.
        ylabel: one for all axes, or one for each.
        title: of the figure.
        share: whether all axes share the y axis.
        columns: number of axes side by side.
        heights: of the rows, in inches; by default all are equal.
    """
    from matplotlib.figure import Figure

    if len(titles) == 1 and not title:
        titles, title = [""], titles[0]
    rows = math.ceil(len(titles) / columns)
    if not heights:
        heights = [HEIGHT] if rows == 1 else [0.8 * HEIGHT] * rows
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = list(figure.subplots(rows, columns, sharey=share, squeeze=False, height_ratios=heights).flatten())
    for axes in grid[len(titles):]:
        axes.set_visible(False)
    common_label = ""
    labels = ylabel
    if isinstance(ylabel, str):
        labels = [ylabel] * len(titles)
        if rows > 1:
            common_label = ylabel
    for number, (axes, panel_title, label) in enumerate(zip(grid, titles, labels, strict=False)):
        lowest = number + columns >= len(titles)  # of its column
        style_axes(axes, xlabel if lowest else "", "" if common_label or number % columns else label)
        axes.set_title(panel_title, loc="left", fontsize="medium" if columns == 1 else "small")
    if common_label:
        figure.supylabel(common_label, fontsize="medium")
    figure.suptitle(fill(title, 74), x=0.01, ha="left", fontsize=_TITLE)
    return figure, grid[: len(titles)]


def style_axes(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Applies the common style: labels, grid, no frame at the top and right, whole numbers on the x axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PNG; its folder is made if it does not exist."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=_RESOLUTION, format="png")
    write_bytes(Path(path), picture.getvalue())
