"""Measured profiles of Admin beside the published one, and the growth of the output change that they make.

`admin_published.txt` holds all 500 values of ω that Admin's authors published for a 100L-100L model of width 512,
profiled on WMT: github.com/microsoft/admin-torch, example/profile.ratio.init, rounded to four digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from deepnmt.config import Model
from deepnmt.errors import UserError
from deepnmt.files import table
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.blocks import SIDES, Side
from deepnmt.plots import GREY, LEGEND, panels, save, style

_PUBLISHED = Path(__file__).with_name("admin_published.txt")
Curves = Mapping[str, Mapping[Side, Sequence[float]]]  # ω by name and side


def published() -> Mapping[Side, Sequence[float]]:
    """The 200 and 300 published values of ω."""
    profile = AdminProfile.load(_PUBLISHED, Model.model_validate({side: {"layers": 100} for side in SIDES}))
    return {"encoder": profile.encoder, "decoder": profile.decoder}


def compare_profiles(files: Sequence[Path], picture: Path) -> str:
    """Plots the profiles of `deepnmt profile` and returns a table.

    Those of width 512 are compared with the published values at every sub-layer that both have: ω does not depend on
    the layers above. The others get the output change Σ β_ii² of their stacks instead.

    Raises:
        UserError: a file is no profile of deepnmt, or the picture cannot be written.
    """
    curves: dict[str, Mapping[Side, Sequence[float]]] = {}
    widths = set()
    for file in files:
        profile, model = _load(file)
        method = profile.provenance.get("method", "separate")  # all were, before there was another
        padding = ", padding counted" if profile.provenance.get("count_padding") else ""
        name = f"{method}{padding}"
        curves[f"{name}, {file.parent.name}" if name in curves else name] = {
            "encoder": profile.encoder, "decoder": profile.decoder}
        widths.add(model.width)
    known = published() if widths == {512} else None
    try:
        (_plot_differences if known else _plot_changes)(curves, known or {}, picture)
    except OSError as error:
        raise UserError(f"picture {picture} cannot be written: {error.strerror or error}; "
                        "set --output to another file") from None
    return f"{table(_rows(curves, known))}\n{picture}"


def _load(file: Path) -> tuple[AdminProfile, Model]:
    """A profile and the model it was measured on."""
    if not file.is_file():
        raise UserError(f"there is no file {file}; give an admin_profile.json that deepnmt profile wrote")
    try:
        model = Model.model_validate(json.loads(file.read_text(encoding="utf-8"))["provenance"]["model"])
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(f"{file} is no profile with its model; give an admin_profile.json that deepnmt profile "
                        "wrote") from None
    return AdminProfile.load(file, model), model


def differences(omega: Sequence[float], known: Sequence[float]) -> list[float]:
    """How far ω is from the known values, in %, at every sub-layer that both have."""
    return [100 * (value / other - 1) for value, other in zip(omega, known)]


def output_changes(omega: Sequence[float]) -> list[float]:
    """Σ_{1<j≤i} β_jj² for i = 2, 3, ...: the output change of the first i sub-layers (Liu et al. 2020, theorem 2).

    x is normed, so the sum of ω_j x and F_j has the variance ω_{j+1}² and β_jj² = 1 - ω_j² / ω_{j+1}². This needs
    variances that were measured in the Admin network itself, that is, in place.
    """
    return [*accumulate(1 - (low / high) ** 2 for low, high in pairwise(omega[1:]))]


def _rows(curves: Curves, known: Mapping[Side, Sequence[float]] | None) -> list[list[str]]:
    rows = [["profile", "stack", "ω_2", "middle", "last", *(
        ["mean difference, %", "largest, %"] if known else ["i·β_ii², least to most", "Σ β_ii²", "ln n"])]]
    for name, sides in curves.items():
        for side, omega in sides.items():
            if len(omega) < 4:
                continue
            row = [name, f"{side}, {len(omega)}", *(f"{omega[i - 1]:.3f}" for i in (2, len(omega) // 2, len(omega)))]
            if known:
                apart = differences(omega, known[side])
                rows.append([*row, f"{sum(apart) / len(apart):+.2f}", f"{max(apart, key=abs):+.2f}"])
            else:
                changes = output_changes(omega)
                shares = [i * (after - before) for i, (before, after) in enumerate(pairwise([0.0, *changes]), 2)]
                rows.append([*row, f"{min(shares):.2f} to {max(shares):.2f}", f"{changes[-1]:.2f}",
                             f"{math.log(len(omega)):.2f}"])
    return rows


def _plot_differences(curves: Curves, known: Mapping[Side, Sequence[float]], path: Path) -> None:
    figure, grid = panels(
        [title for side in SIDES for title in (f"ω, {side}", f"difference from the published ω, {side}")],
        "sub-layer, counted from the bottom of its stack", ["ω, a factor", "%"] * 2,
        "Admin's initial ω at 100L-100L, width 512: measured and published", share=False, heights=[2.2, 1.6] * 2)
    for axes, apart, side in zip(grid[::2], grid[1::2], SIDES, strict=True):
        axes.plot(range(1, len(known[side]) + 1), known[side], color=GREY, linewidth=2.5, label="published")
        apart.axhline(0, color=GREY, linewidth=2.5)
        for number, (name, sides) in enumerate(curves.items()):
            look = {**style(number, len(sides[side])), "linewidth": 1.2}
            axes.plot(range(1, len(sides[side]) + 1), sides[side], **look, label=name)
            values = differences(sides[side], known[side])
            apart.plot(range(1, len(values) + 1), values, **look)
        axes.set_ylim(bottom=0)
    grid[0].legend(**LEGEND)
    save(figure, path)


def _plot_changes(curves: Curves, _known: Mapping[Side, Sequence[float]], path: Path) -> None:
    figure, grid = panels(
        ["ω against the sub-layer", "output change of all sub-layers up to number i, Σ β_jj²; dotted: ln i"],
        "sub-layer i, counted from the bottom of its stack", ["ω, a factor", "a sum of shares"],
        "Admin's initial ω, and the output change that they allow", share=False)
    longest, number = 2, 0
    for name, sides in curves.items():
        for side, omega in sides.items():
            if len(omega) < 4:
                continue
            grid[0].plot(range(1, len(omega) + 1), omega, **style(number, len(omega)), label=f"{side}, {name}")
            if name.startswith("in_place"):
                changes = output_changes(omega)
                grid[1].plot(range(2, len(changes) + 2), changes, **style(number, len(changes)))
            longest, number = max(longest, len(omega)), number + 1
    grid[1].plot(range(1, longest + 1), [math.log(i) for i in range(1, longest + 1)], color=GREY, linestyle=":")
    grid[1].set_xscale("log")
    grid[1].xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    grid[0].set_ylim(bottom=0)
    grid[0].legend(**LEGEND)
    save(figure, path)
