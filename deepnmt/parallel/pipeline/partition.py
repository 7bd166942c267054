"""How a model is partitioned into pipeline stages: the cost of each unit, the balanced partition, and its table.

A model is a sequence of units: source (embedding), encoder layers, target (the encoder's final norm and the target
embedding), decoder layers, output (the decoder's final norm, projection and loss). A stage is consecutive units.

`S` source and `T` target tokens of a micro-batch, `D` width, `F` inner width, `V` vocabulary, `P` stages, `M` micro-
batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepnmt.config import Model
from deepnmt.config.choices import Use
from deepnmt.errors import UserError
from deepnmt.files import table
from deepnmt.model.blocks import Side
from deepnmt.model.embedding import table_rows, table_width
from deepnmt.model.transformer import Transformer, unit_names

# Among partitions whose slowest stage is within this factor of the best, one with a boundary between encoder and
# decoder is preferred: only the encoder's output crosses it, and the encoder's stages need no target.
_BOUNDARY_BONUS = 1.05
_LENGTH = 30  # tokens a sentence, for the cost of attention scores: 1 to 2 % of a layer at usual lengths


@dataclass(frozen=True)
class Unit:
    """One unit.

    Attributes:
        parameters: their number, without the embedding table's.
        cost: multiply-adds for each target token.
        table: name and number of parameters of the embedding table that it uses.
    """

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

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """The stage's units."""
        return self.units[self.bounds[stage] : self.bounds[stage + 1]]

    def cost(self, stage: int) -> float:
        """The stage's share of the model's cost, 0 to 1."""
        return _cost(self.units_of(stage)) / _cost(self.units)

    def parameters(self, stage: int) -> int:
        """The number of parameters that the stage holds; a table that several of its units share counts once."""
        count = 0
        tables: dict[str, int] = {}
        for unit in self.units_of(stage):
            count += unit.parameters
            if unit.table:
                name, size = unit.table
                tables[name] = size
        return count + sum(tables.values())

    def bubble(self, micro_batches: int) -> float:
        """The share of time that stages are expected to idle, on average, with M micro-batches an update.

        For equal stages it is (P - 1) / (M + P - 1) (Huang et al. 2019, GPipe, section 2.3); a stage with less work
        also waits for the slowest one.
        """
        slowest = max(self.cost(stage) for stage in range(self.stages))
        return 1 - micro_batches / (self.stages * slowest * (micro_batches + self.stages - 1))

    def table(self, micro_batches: int) -> str:
        """A table to print: each stage's units, parameters and share of the work; then the expected bubble."""
        rows = [("stage", "units", "parameters", "work")]
        for stage in range(self.stages):
            units = self.units_of(stage)
            names = units[0].name
            if len(units) > 1:
                names += f" ... {units[-1].name}"
            rows.append((str(stage), f"{names} ({len(units)})", f"{self.parameters(stage):,}",
                         f"{100 * self.cost(stage):.1f} %"))
        count = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        return (f"{table(rows, left=2)}\nexpected bubble with {count} an update: "
                f"{100 * self.bubble(micro_batches):.0f} %")


def layer_of(name: str) -> tuple[Side, int] | None:
    """("decoder", 3) for "decoder.layers.3"; None for a unit that is not a layer."""
    if "." not in name:
        return None
    side, _, index = name.split(".")
    return ("encoder" if side == "encoder" else "decoder"), int(index)


def multiply_adds(model: Model) -> tuple[int, int, int]:
    """Multiply-adds of the matrix products of one layer, attention scores left out: of an encoder layer a source token
    (4D² + 2DF, with a gate 3DF), of a decoder layer a target token (6D² + 2DF), and of its cross-attention's keys and
    values a source token (2DM, M the encoder's width)."""
    (e, _, f), (d, _, g), matrices = model.shape("encoder"), model.shape("decoder"), model.ffn_matrices
    return 4 * e * e + matrices * e * f, 6 * d * d + matrices * d * g, 2 * d * e


def cost_units(model: Model, src_vocab: int, trg_vocab: int, ratio: float = 1.0) -> tuple[Unit, ...]:
    """The model's units with their parameters and costs; `ratio`: source tokens for each target token.

    A cost counts multiply-adds. Layers: those of `multiply_adds`, and for attention scores 2·L·D a query. Output: D·V a
    target token. An embedding counts as D².
    """
    e, d = model.shape("encoder")[0], model.shape("decoder")[0]
    of_encoder, of_decoder, crossing = multiply_adds(model)
    encoder = ratio * (of_encoder + 2 * _LENGTH * e)
    decoder = of_decoder + 4 * _LENGTH * d + ratio * crossing
    if "encoder" not in model.sides:
        decoder = of_decoder - 2 * d * d + 2 * _LENGTH * d  # without cross-attention
    layers: dict[Side, float] = {"encoder": encoder, "decoder": decoder}
    ends: dict[str, tuple[Use, int, float]] = {
        "source": ("src", src_vocab, ratio * e * e),
        "target": ("trg", trg_vocab, d * d),
        "output": ("out", trg_vocab, model.shape(model.last).width * table_rows(model, trg_vocab)),
    }
    units = []
    for name, parameters in _sizes(model).items():
        layer = layer_of(name)
        if layer:
            side, _ = layer
            units.append(Unit(name, parameters, layers[side]))
        else:
            use, vocab, cost = ends[name]
            rows = table_rows(model, vocab)
            units.append(Unit(name, parameters, cost, (model.tables[use], rows * table_width(model, use))))
    return tuple(units)


def _sizes(model: Model) -> dict[str, int]:
    """The number of parameters of each unit, without tables, counted on modules as training builds them."""
    sizes = {}
    for number, name in enumerate(unit_names(model)):
        stage = Transformer(model, 1, 1, 0, units=range(number, number + 1))
        sizes[name] = 0
        for part in (stage.encoder, stage.decoder):
            sizes[name] += sum(p.numel() for p in part.parameters())
    return sizes


def check_stages(stages: int, encoder: int, decoder: int) -> None:
    """Raises `UserError` if there are more stages than layers."""
    if stages > encoder + decoder:
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but the model has {encoder + decoder} layers ({encoder} encoder, "
            f"{decoder} decoder) and a stage needs at least one; set it to {encoder + decoder} or less"
        )


def partition(units: Sequence[Unit], stages: int) -> Partition:
    """The partition whose slowest stage is fastest; one nearly as good with a boundary before "target" is preferred.

    Raises:
        UserError: more stages than layers.
    """
    names = [unit.name for unit in units]
    layers = Counter(name.partition(".")[0] for name in names)
    check_stages(stages, layers["encoder"], layers["decoder"])
    bounds = _best(units, 0, len(units), stages)
    least = _slowest(units, bounds) * _BOUNDARY_BONUS
    border = names.index("target") if "target" in names else 0
    for before in range(1, stages):
        if before <= border and stages - before <= len(units) - border:
            left, right = _best(units, 0, border, before), _best(units, border, len(units), stages - before)
            candidate = (*left, *right[1:])
            slowest = _slowest(units, candidate)
            if slowest < least:
                bounds, least = candidate, slowest
    return Partition(tuple(units), bounds)


def _cost(units: Sequence[Unit]) -> float:
    return sum(unit.cost for unit in units)


def _slowest(units: Sequence[Unit], bounds: Sequence[int]) -> float:
    """The cost of the most expensive stage."""
    return max(_cost(units[start:stop]) for start, stop in pairwise(bounds))


def _best(units: Sequence[Unit], start: int, stop: int, stages: int) -> tuple[int, ...]:
    """Bounds that divide units[start:stop] into `stages` non-empty stages, with the smallest possible cost of the most
    expensive one (dynamic programming)."""
    sums = [0.0]
    for unit in units[start:stop]:
        sums.append(sums[-1] + unit.cost)
    # Of the first units, by their number: the cost of the slowest stage, and the bounds.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (start,))}
    for _ in range(stages):
        with_another: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (slowest, bounds) in best.items():
            for end in range(begin + 1, len(sums)):
                candidate = max(slowest, sums[end] - sums[begin]), (*bounds, start + end)
                with_another[end] = min(with_another.get(end, candidate), candidate)
        best = with_another
    _, bounds = best[stop - start]
    return bounds
