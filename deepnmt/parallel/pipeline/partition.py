"""Where a pipeline cuts the model: a cost for each unit, the cuts that balance it, and the table a user reads.

A model is a row of units: source (embedding), encoder layers, target (what stands on the encoder, and the target
embedding), decoder layers, output (what stands on the decoder, projection and loss). A stage is a run of them.

`S` source and `T` target tokens of a micro-batch, `D` width, `F` inner width, `V` vocabulary, `P` stages, `M` micro-
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from deepnmt.config import Model
from deepnmt.errors import UserError
from deepnmt.files import table
from deepnmt.model.blocks import Side
from deepnmt.model.embedding import TABLES, InputLayer, Use
from deepnmt.model.transformer import build_layer, build_top

# Among cuts whose slowest stage is within this factor of the best, one between encoder and decoder is preferred: it
# sends the encoder's output alone, and the encoder's stages need no target.
_BOUNDARY_BONUS = 1.05
_LENGTH = 30  # tokens a sentence, for the share of attention scores; 1 to 2 % of a layer at usual lengths


@dataclass(frozen=True)
class Unit:
    """One unit: its name, its parameters without an embedding table's, its multiply-adds for a target token (relative
    cost), and the table that it reads: name and size."""

    name: str
    parameters: int
    cost: float
    table: tuple[str, int] | None = None


@dataclass(frozen=True)
class Partition:
    """Stage s holds the units `bounds[s]` to `bounds[s + 1]` - 1."""

    units: tuple[Unit, ...]
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def held(self, stage: int) -> tuple[Unit, ...]:
        """The stage's units."""
        return self.units[self.bounds[stage] : self.bounds[stage + 1]]

    def cost(self, stage: int) -> float:
        """The stage's share of the work, 0 to 1."""
        return sum(unit.cost for unit in self.held(stage)) / sum(unit.cost for unit in self.units)

    def parameters(self, stage: int) -> int:
        """Trainable numbers that the stage holds; a table that several of its units read is there once."""
        held = self.held(stage)
        return sum(unit.parameters for unit in held) + sum(dict(unit.table for unit in held if unit.table).values())

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
            held = self.held(stage)
            names = held[0].name if len(held) == 1 else f"{held[0].name} ... {held[-1].name}"
            rows.append((str(stage), f"{names} ({len(held)})", f"{self.parameters(stage):,}",
                         f"{100 * self.cost(stage):.1f} %"))
        count = f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"
        return (f"{table(rows, left=2)}\nexpected bubble with {count} an update: "
                f"{100 * self.bubble(micro_batches):.0f} %")


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
    layers: dict[Side, float] = {"encoder": encoder, "decoder": decoder}
    ends: dict[str, tuple[Use, int, float]] = {
        "source": ("src", src_vocab, ratio * d * d),
        "target": ("trg", trg_vocab, d * d),
        "output": ("out", trg_vocab, d * trg_vocab),
    }
    units = []
    for name, parameters in _sizes(model).items():
        if place := layer_of(name):
            units.append(Unit(name, parameters, layers[place[0]]))
        else:
            use, vocab, cost = ends[name]
            units.append(Unit(name, parameters, cost, (TABLES[model.tied][use], vocab * d)))
    return tuple(units)


def _sizes(model: Model) -> dict[str, int]:
    """The parameters of each unit without tables, counted on what training builds."""
    parts: dict[str, list[nn.Module]] = {
        "source": [InputLayer(model, "encoder", 0)],
        "target": [build_top(model, "encoder"), InputLayer(model, "decoder", 0)],
        "output": [build_top(model, "decoder")],
    }
    sizes = {}
    for name in unit_names(model):
        place = layer_of(name)
        built = [build_layer(model, *place, 0)] if place else parts[name]
        sizes[name] = sum(p.numel() for part in built for p in part.parameters())
    return sizes


def check_stages(stages: int, encoder: int, decoder: int) -> None:
    """Raises `UserError` where there are more stages than layers."""
    if stages > encoder + decoder:
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but the model has {encoder + decoder} layers ({encoder} encoder, "
            f"{decoder} decoder) to share among stages; set it to {encoder + decoder} or less"
        )


def partition(units: Sequence[Unit], stages: int) -> Partition:
    """The cuts whose slowest stage is fastest; near-equals with a cut before "target" are preferred.

    Raises:
        UserError: more stages than layers.
    """
    check_stages(stages, *(sum(unit.name.startswith(side) for unit in units) for side in ("encoder", "decoder")))
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
