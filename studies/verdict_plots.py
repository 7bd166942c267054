"""The picture of a verdict's grid of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepnmt.plots import save
from studies.side_by_side import DTYPES

_BROADEST = 40  # columns of panels side by side

Column = tuple[bool, int, float]  # without warm-up, layers, rate
Panel = dict[tuple[str, Column], list[float]]  # by block and column, what its runs ended at


def plot_grid(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The runs of a grid: a row for each block, a column for each depth and rate, with and without warm-up; a panel for
    each precision, batch size and initialisation.

    The colour is the final loss as a share of the mark that a run must come under: blue below, red above; the mean over
    seeds.
    """
    cells: dict[tuple[str, int, str], Panel] = defaultdict(lambda: defaultdict(list))
    for record in records:
        point = record["point"]
        name = point["encoder"] if point["encoder"] == point["decoder"] else f"{point['encoder']} / {point['decoder']}"
        kind = point.get("precision", "fp32"), point.get("sentences", 0), point.get("init", "auto")
        column = not point["warmup"], point["layers"], point["rate"]
        cells[kind][name, column].append(min(record["final"] / record["bar"], 2.0))
    rows = sorted({name for panel in cells.values() for name, _ in panel})
    names = [str(name) for name in DTYPES]
    bands: list[list[tuple[str, Panel]]] = []  # panels side by side, each with its title
    for kind in sorted(cells, key=lambda kind: (names.index(kind[0]), kind[2] != "auto", -len(cells[kind]), kind[1:])):
        precision, size, init = kind
        words = [precision, f"{size} sentences a batch" if size else "", f"init: {init}" if init != "auto" else ""]
        panel = ", ".join(filter(None, words)), cells[kind]
        if bands and sum(_breadths([*bands[-1], panel])) <= _BROADEST:
            bands[-1].append(panel)
        else:
            bands.append([panel])
    figure = Figure(figsize=(max(8.0, 0.36 * max(sum(_breadths(band)) for band in bands) + 3),
                             (0.36 * len(rows) + 2.2) * len(bands) + 0.4), layout="constrained")
    figure.suptitle(f"{len(records)} runs: blue learned, red did not ('none': no warm-up)", x=0.01, ha="left")
    for part, band in zip(figure.subfigures(len(bands), 1, squeeze=False)[:, 0], bands, strict=True):
        row = part.subplots(1, len(band), sharey=True, squeeze=False, width_ratios=_breadths(band))[0]
        for axes, (title, cell) in zip(row, band, strict=True):
            columns = sorted({column for _, column in cell})
            table = np.full((len(rows), len(columns)), np.nan)
            for (name, column), values in cell.items():
                table[rows.index(name), columns.index(column)] = np.mean(values)
            image = axes.imshow(table, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
            axes.set_yticks(range(len(rows)), rows)
            axes.set_xticks(range(len(columns)), [f"{layers}L {rate:g}{' none' if bare else ''}"
                                                  for bare, layers, rate in columns], rotation=90, fontsize="small")
            axes.set_title(title, loc="left", fontsize="medium")
        part.colorbar(image, ax=list(row), label="final loss / mark")
    save(figure, path)


def _breadths(band: Sequence[tuple[str, Panel]]) -> list[int]:
    """Columns of each panel."""
    return [len({column for _, column in panel}) for _, panel in band]
