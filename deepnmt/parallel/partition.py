"""Where a pipeline cuts the model: a cost for each unit, the cuts that balance it, and the table a user reads.

A model is a row of units: source (embedding), encoder layers, target (the encoder's norm and the target embedding),
decoder layers, output (the decoder's norm, projection and loss). A stage is a run of them.

`S` source and `T` target tokens of a micro-batch, `D` width, `F` inner width, `V` vocabulary, `P` stages, `M` micro-
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepnmt.config import Model
from deepnmt.errors import UserError
from deepnmt.model.residual import Side

# Among cuts whose slowest stage is within this factor of the best, one between encoder and decoder is preferred: it
# sends the encoder's output alone, and the encoder's stages need no target.
_BOUNDARY_BONUS = 1.05
_LENGTH = 30  # tokens a sentence, for the share of attention scores; 1 to 2 % of a layer at usual lengths


@dataclass(frozen=True)
class Unit:
    """One unit: its name, the parameters it uses, and its multiply-adds for a target token (relative cost)."""

    name: str
    parameters: int
    cost: float


@dataclass(frozen=True)
class Partition:
    """Stage s holds the units `bounds[s]` to `bounds[s + 1]` - 1."""

    units: tuple[Unit, ...]
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def cost(self, stage: int) -> float:
        """The stage's share of the work, 0 to 1."""
        held = self.units[self.bounds[stage] : self.bounds[stage + 1]]
        return sum(unit.cost for unit in held) / sum(unit.cost for unit in self.units)

    def bubble(self, micro_batches: int) -> float:
        """The expected idle share of a stage's time, averaged over stages, with M micro-batches an update.

        With equal stages (P - 1) / (M + P - 1) (Huang et al. 2019, GPipe, section 2.3); a stage that has less than its
        share of the work waits for the slowest one besides.
        """
        slowest = max(self.cost(stage) for stage in range(self.stages))
        return 1 - micro_batches / (self.stages * slowest * (micro_batches + self.stages - 1))

    def table(self, micro_batches: int) -> str:
        """What a user reads: stage, units, parameters, share of the work, and the expected bubble."""
        rows = [("stage", "units", "parameters", "work")]
        for stage in range(self.stages):
            held = self.units[self.bounds[stage] : self.bounds[stage + 1]]
            names = held[0].name if len(held) == 1 else f"{held[0].name} ... {held[-1].name}"
            rows.append(
                (
                    str(stage),
                    f"{names} ({len(held)})",
                    f"{sum(u.parameters for u in held):,}",
                    f"{100 * self.cost(stage):.1f} %",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in rows]
        count = f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"
        lines.append(f"expected bubble with {count} an update: {100 * self.bubble(micro_batches):.0f} %")
        return "\n".join(lines)


def unit_names(model: Model) -> list[str]:
    """The units from input to loss."""
    return [
        "source",
        *(f"encoder.layers.{i}" for i in range(model.encoder.layers)),
        "target",
        *(f"decoder.layers.{i}" for i in range(model.decoder.layers)),
        "output",
    ]


def layer_of(name: str) -> tuple[Side, int] | None:
    """("decoder", 3) of "decoder.layers.3"; None for a unit that is no layer."""
    if "." not in name:
        return None
    side, _, index = name.split(".")
    return ("encoder" if side == "encoder" else "decoder"), int(index)


def cost_units(model: Model, src_vocab: int, trg_vocab: int, ratio: float = 1.0) -> tuple[Unit, ...]:
    """The units with what they hold and cost; `ratio`: source tokens for each target token.

    Multiply-adds of the matrix products (as in `speed.model_flops`): an encoder layer sees the source, 4D² + 2DF a
    token; a decoder layer the target, 6D² + 2DF, and the source through its keys and values, 2D²; attention scores
    2·L·D a query; the output D·V a target token. An embedding counts as D².
    """
    d, f = model.width, model.ffn
    encoder = ratio * (4 * d * d + 2 * d * f + 2 * _LENGTH * d)
    decoder = 6 * d * d + 2 * d * f + 4 * _LENGTH * d + ratio * 2 * d * d
    sizes = {"encoder": 4 * d * d + 2 * d * f + 9 * d + f, "decoder": 8 * d * d + 2 * d * f + 15 * d + f}
    units = []
    for name in unit_names(model):
        place = layer_of(name)
        if place is not None:
            units.append(Unit(name, sizes[place[0]], encoder if place[0] == "encoder" else decoder))
        elif name == "source":
            units.append(Unit(name, src_vocab * d, ratio * d * d))
        else:
            units.append(Unit(name, trg_vocab * d, d * d if name == "target" else d * trg_vocab))
    return tuple(units)


def partition(units: Sequence[Unit], stages: int) -> Partition:
    """The cuts whose slowest stage is fastest; near-equals with a cut before "target" are preferred.

    Raises:
        UserError: more stages than layers.
    """
    layers = {side: sum(unit.name.startswith(side) for unit in units) for side in ("encoder", "decoder")}
    if stages > sum(layers.values()):
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but the model has {sum(layers.values())} layers "
            f"({layers['encoder']} encoder, {layers['decoder']} decoder) to share among stages; set it to "
            f"{sum(layers.values())} or less"
        )
    free = _best(units, 0, len(units), stages)
    border = next(i for i, unit in enumerate(units) if unit.name == "target")
    candidates = []
    for before in range(1, stages):
        if before <= border and stages - before <= len(units) - border:
            left = _best(units, 0, border, before)
            candidates.append((*left, *_best(units, border, len(units), stages - before)[1:]))
    bounds = min(
        [free, *candidates], key=lambda cuts: _slowest(units, cuts) * (_BOUNDARY_BONUS if cuts is free else 1.0)
    )
    return Partition(tuple(units), bounds)


def _slowest(units: Sequence[Unit], bounds: Sequence[int]) -> float:
    return max(sum(u.cost for u in units[a:b]) for a, b in pairwise(bounds))


def _best(units: Sequence[Unit], start: int, stop: int, stages: int) -> tuple[int, ...]:
    """Bounds of `stages` runs of units[start:stop], none empty, with the smallest largest cost (dynamic
    programming)."""
    sums = [0.0]
    for unit in units[start:stop]:
        sums.append(sums[-1] + unit.cost)
    count = stop - start
    best: list[list[tuple[float, tuple[int, ...]]]] = [[(float("inf"), ())] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, (0,))
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            best[stage][end] = min(
                (max(best[stage - 1][cut][0], sums[end] - sums[cut]), (*best[stage - 1][cut][1], end))
                for cut in range(stage - 1, end)
            )
    return tuple(start + cut for cut in best[stages][count][1])
