"""What all pictures look like, and those of a run: ω against depth and its learning curve.

Matplotlib is imported when a picture is made, so that nothing else waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deepnmt.model.admin import AdminProfile

# Okabe and Ito's palette: told apart in every form of colour blindness. Dashes tell its second round from the first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
GREY = "#767676"
HEIGHT = 4.5  # inches
_RESOLUTION = 120  # dots an inch


def plot_admin_profile(profile: AdminProfile, path: str | Path) -> None:
    """ω against the sub-layer's number in its stack, with the growth published for a d 512, 100L-100L model."""
    figure, [axes] = panels(["Admin: initial shortcut weight ω"], "Sub-layer, counted from the bottom of its stack",
                            "ω")
    stacks = {"encoder": profile.encoder, "decoder": profile.decoder}
    for (name, values), colour in zip(stacks.items(), COLOURS, strict=False):
        if values:
            axes.plot(range(1, len(values) + 1), values, color=colour, label=f"{name}, {len(values)} sub-layers",
                      marker=marker(values), markersize=3)
    depths = range(1, max(map(len, stacks.values())) + 1)
    axes.plot(depths, [math.sqrt(1 + 0.39 * (k - 1)) for k in depths], color=GREY, linestyle=(0, (2, 2)),
              linewidth=1.2, label="√(1 + 0.39 (k − 1)), about as published for width 512")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def plot_learning_curve(records: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Training and validation loss against updates, and the validations' BLEU on an axis at the right.

    Args:
        records: those of a run's `log.jsonl`; types other than "train" and "valid" are passed over.
        path: the PNG to write.
    """
    def points(kind: str, key: str) -> list[tuple[int, float]]:
        """(update, value) of the records that hold a finite value; logs write NaN and infinity as text."""
        values = [(int(r["update"]), float(r[key])) for r in records if r["type"] == kind and r.get(key) is not None]
        return [(update, value) for update, value in values if math.isfinite(value)]

    figure, [axes] = panels(["Learning curve"], "Update", "Loss, nats a target token")
    for kind, label, colour in (("train", "training loss", COLOURS[5]), ("valid", "validation loss", COLOURS[0])):
        if losses := points(kind, "loss"):
            axes.plot(*zip(*losses, strict=True), color=colour, marker=marker(losses), markersize=4, label=label)
    lines = list(axes.get_lines())
    if bleu := points("valid", "bleu"):
        right = axes.twinx()
        lines += right.plot(*zip(*bleu, strict=True), color=COLOURS[1], linestyle="--", marker="s", markersize=4,
                            label="validation BLEU")
        right.set_ylabel("BLEU", color=COLOURS[1])
        right.tick_params(axis="y", colors=COLOURS[1])
        right.spines["top"].set_visible(False)
        right.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    save(figure, path)


def style(number: int) -> dict[str, Any]:
    """Colour and dashes of the line of this number, from 0."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def marker(points: Sequence[Any]) -> str | None:
    """Few points are marked, so that one alone is seen at all; many would hide the line."""
    return "o" if len(points) <= 40 else None


def panels(titles: Sequence[str], xlabel: str, ylabel: str, title: str = "", *, share: bool = True
           ) -> tuple[Figure, list[Axes]]:
    """Axes side by side, one for each of `titles`, with a title over all; `share`: the y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8.0, 5.5 * len(titles)), HEIGHT), layout="constrained")
    row = list(figure.subplots(1, len(titles), sharey=share, squeeze=False)[0])
    for axes, own in zip(row, titles, strict=True):
        dress(axes, xlabel, ylabel)
        axes.set_title(own, loc="left")
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return figure, row


def dress(axes: Axes, xlabel: str, ylabel: str) -> None:
    """What all pictures look like."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_RESOLUTION, format="png")
