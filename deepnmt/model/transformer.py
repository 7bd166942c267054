"""The Transformer: encoder and decoder, or one of them.

`B` sentences, `S` source length, `T` target length, `D` width (the memory has the encoder's), `H` heads, `d` = D / H,
`V` vocabulary, `K` beams.
Parameters have the same names in every layout: `embeddings.shared.weight`, `encoder.layers.17.ffn.fc1.weight`,
`decoder.layers.3.rule.norms.2.bias`, `encoder.norm.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepnmt import config
from deepnmt.batch import TRANSLATION, Batch
from deepnmt.config.choices import TYINGS, Use
from deepnmt.model.blocks import LayerPosition, Side, Stream, tensors
from deepnmt.model.cache import Cache
from deepnmt.model.embedding import bands_of, new_table
from deepnmt.model.layers import DecoderLayer, EncoderLayer, InputLayer, Layer
from deepnmt.model.loss import CrossEntropy, LossSums, Objective
from deepnmt.model.sublayers import key_mask
from deepnmt.tokens import PAD


def build_layer(model: config.Model, side: Side, index: int, seed: int) -> Layer:
    """Layer `index` (from 0) of a stack by itself, with the same dropout masks as in the whole model."""
    return (EncoderLayer if side == "encoder" else DecoderLayer)(model, LayerPosition.of(model, side, index), seed)


def build_top(model: config.Model, side: Side) -> nn.Module:
    """The top of a stack by itself: from the last layer's output to the stack's output [B, T, D]."""
    position = LayerPosition.of(model, side, model.stack(side).layers)
    return position.block.top(position)


def stream_start(model: config.Model, side: Side) -> Callable[[Tensor], Stream]:
    """From a stack's input x [B, T, D] to what enters its layers."""
    position = LayerPosition.of(model, side, 0)
    return partial(position.block.start, position)


def fill_with_nan(part: nn.Module) -> None:
    """Sets every parameter to NaN, so that a weight that `init.fill` misses is noticed."""
    for parameter in part.parameters():
        parameter.detach().fill_(math.nan)


def run_layers(layers: Sequence[nn.Module], recompute: int, x: Stream, *rest: Tensor | int | None) -> Stream:
    """Passes x [B, T, D], or a stream of several tensors, through `layers`, each called as layer(x, *rest).

    Args:
        recompute: activation checkpointing (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost): of every
            group of this many layers only the input is kept, and the group runs again in the backward pass. 0 keeps
            all activations. Dropout masks are the same both times, because each layer seeds them.
    """
    def run(x: Stream, start: int, stop: int) -> Stream:
        for layer in layers[start:stop]:
            x = layer(x, *rest)
        return x

    if not recompute or not torch.is_grad_enabled():
        return run(x, 0, len(layers))
    for start in range(0, len(layers), recompute):
        x = checkpoint(run, x, start, start + recompute, use_reentrant=False, preserve_rng_state=False)
    return x


def unit_names(model: config.Model) -> list[str]:
    """The units of a model from input to loss, of which a pipeline's stage has some."""
    units = []
    for side in model.sides:
        units += [_ENTRY[side], *(f"{side}.layers.{i}" for i in range(model.stack(side).layers))]
    return [*units, "output"]


_ENTRY: dict[Side, str] = {"encoder": "source", "decoder": "target"}


class Stack(nn.Module):
    """One side of the model: input layer, layers, and the block's top: nothing, a norm, or DLCL's mixture. Parts whose
    unit is not among `units` are None."""

    input: InputLayer
    norm: nn.Module

    def __init__(
        self, model: config.Model, side: Side, seed: int, after_build: Callable[[nn.Module], None],
        units: Collection[str],
    ) -> None:
        super().__init__()
        begins, ends = _ENTRY[side], "output" if side == model.last else "target"

        def built(unit: str, build: Callable[[], nn.Module]) -> nn.Module | None:
            if unit not in units:
                return None
            part = build()
            after_build(part)
            return part

        self.register_module("input", built(begins, partial(InputLayer, model, side, seed)))
        self.layers = nn.ModuleList()
        if side not in model.sides:
            units = ()
        for index in range(model.stack(side).layers):
            layer = built(f"{side}.layers.{index}", partial(build_layer, model, side, index, seed))
            self.layers.add_module(str(index), layer)
        self.register_module("norm", built(ends, partial(build_top, model, side)))
        self.start = stream_start(model, side)

    @property
    def present(self) -> list[Layer]:
        """The layers that are not None, lowest first."""
        return [layer for layer in cast(Iterable[Layer | None], self.layers) if layer is not None]


class Transformer(nn.Module):
    """The model of a recipe, or a stage of it, without weights: `init.fill` sets them.

    In training mode each layer seeds the default generator of its device (see `dropout.py`).

    Args:
        model: shapes, dropouts and blocks.
        src_vocab, trg_vocab: vocabulary sizes; equal if `model.tied` has one table for both.
        seed: with the `dropout_key` of each call it fixes the dropout masks.
        objective: what training minimises; None: cross-entropy.
        after_build: called with every part (table, input layer, layer, top of a stack) as soon as it is built, so that
            it can be moved, cast or partitioned before the next one takes memory.
        units: which of `unit_names` it has; None: all. Parts of others are None, and all have the names of the whole.
    """

    def __init__(
        self, model: config.Model, src_vocab: int, trg_vocab: int, seed: int, objective: Objective | None = None,
        after_build: Callable[[nn.Module], None] = fill_with_nan, units: range | None = None,
    ) -> None:
        super().__init__()
        if TYINGS[model.tied].joint and src_vocab != trg_vocab:
            raise ValueError(f"model.tied: {model.tied} needs one vocabulary, but the sizes are {src_vocab} and "
                             f"{trg_vocab}")
        self.project: nn.Module | None = None  # the output projection, if it is packed (decode/packed.py)
        self.recompute = 0  # see `run_layers`
        self.shape = model.shape(model.last)
        self.sides = model.sides
        self.tables = model.tables
        self.bands = bands_of(model, trg_vocab)
        names = unit_names(model)
        held = names if units is None else names[units.start : units.stop]
        sizes: dict[Use, int] = {"src": src_vocab, "trg": trg_vocab, "out": trg_vocab}
        users: dict[Use, str] = {"src": "source", "trg": "target", "out": "output"}
        self.embeddings = nn.ModuleDict()
        for use, name in self.tables.items():
            if users[use] in held and name not in self.embeddings:
                self.embeddings[name] = new_table(model, use, sizes[use])
                after_build(self.embeddings[name])
        self.encoder = Stack(model, "encoder", seed, after_build, held)
        self.decoder = Stack(model, "decoder", seed, after_build, held)
        self.objective = CrossEntropy() if objective is None else objective
        if units is None:
            self.objective.attach(self)

    def forward(self, batch: Batch) -> LossSums:
        """The loss of a micro-batch: of predicting trg_out [B, T] from src [B, S] and trg_in [B, T], or from one of
        them if the model has one side."""
        batch = self.objective.prepare(batch)
        _, hidden = self.run(batch)
        assert isinstance(hidden, Tensor)
        return self.objective.loss(hidden, self.output_weight, batch)

    def run(self, batch: Batch, memory: Stream | None = None, hidden: Stream | None = None
            ) -> tuple[Stream | None, Stream | None]:
        """Passes a prepared micro-batch through the units that there are.

        Args:
            memory: what a stage gets of the encoder: the stream of its last layer, or its end [B, S, D].
            hidden: what a stage gets of the decoder: the stream of its last layer; None before its input.

        Returns:
            The same after these units. Without a decoder the encoder's end is `hidden`, which predicts.
        """
        if hidden is None and "encoder" in self.sides:
            memory = self.encode(batch["src"], batch["src_lengths"], batch.key, memory)
        if "decoder" not in self.sides:
            return memory, memory if self.encoder.norm is not None else None
        if "encoder" not in self.sides:
            return None, self.decode(batch["trg_in"], None, None, batch.key, hidden)
        if hidden is not None or self.decoder.input is not None:
            assert isinstance(memory, Tensor)
            hidden = self.decode(batch["trg_in"], memory, batch["src_lengths"], batch.key, hidden)
        return memory, hidden

    @property
    def figures(self) -> tuple[str, ...]:
        """See `Objective`."""
        return self.objective.figures

    @staticmethod
    def smallest_batch(device: torch.device) -> Batch:
        """One sentence of two tokens, for an update that must not change the weights."""
        ids = torch.full((1, 2), PAD + 1, device=device)
        tensors = ids, torch.tensor([2], device=device), ids, ids
        return Batch(dict(zip(TRANSLATION, tensors, strict=True)), key=0, tokens=2)

    def encode(self, src: Tensor, src_lengths: Tensor, dropout_key: int = 0, x: Stream | None = None) -> Any:
        """src [B, S] to the memory [B, S, D]; its values at padding have no meaning. A stage may begin with a stream x,
        and ends with one if the stack goes on in the next."""
        if self.encoder.input is not None:
            x = self.encoder.start(self.encoder.input(self.embed(src, src_lengths), dropout_key))
        assert x is not None
        if layers := self.encoder.present:
            first = tensors(x)[0]
            x = run_layers(layers, self.recompute, x, key_mask(src_lengths, first.size(1), first.dtype), dropout_key)
        return x if self.encoder.norm is None else self.encoder.norm(x)

    def decode(
        self, trg_in: Tensor, memory: Tensor | None, src_lengths: Tensor | None, dropout_key: int = 0,
        x: Stream | None = None,
    ) -> Any:
        """trg_in [B, T] and the memory [B, S, D], None without an encoder, to the stack's output [B, T, D]. For a stage
        see `encode`."""
        if self.decoder.input is not None:
            x = self.decoder.start(self.decoder.input(self.table("trg")(trg_in), dropout_key))
        assert x is not None
        if layers := self.decoder.present:
            mask = None
            if memory is not None and src_lengths is not None:
                mask = key_mask(src_lengths, memory.size(1), memory.dtype)
            x = run_layers(layers, self.recompute, x, memory, mask, dropout_key)
        return x if self.decoder.norm is None else self.decoder.norm(x)

    def embed(self, src: Tensor, src_lengths: Tensor) -> Tensor:
        """src [B, S] to the vectors [B, S, D] that the encoder's input layer takes. A task whose source is not tokens
        has another way, and its lengths count these vectors."""
        return self.table("src")(src)

    def table(self, use: Use) -> nn.Embedding:
        """The embedding table [V, D] for a use; tied uses share one."""
        return cast(nn.Embedding, self.embeddings[self.tables[use]])

    @property
    def output_weight(self) -> Tensor:
        """The output projection [V, D]."""
        return self.table("out").weight

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The decoder's layers, lowest first."""
        return cast(list[DecoderLayer], list(self.decoder.layers))

    @property
    def target_vocab(self) -> int:
        """V of the output."""
        return len(self.output_weight) if self.bands is None else self.bands.stops[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] to logits [..., V], with -inf for pad."""
        if self.bands is not None:
            logits = self.bands.log_probabilities(hidden, self.output_weight)
        else:
            logits = F.linear(hidden, self.output_weight) if self.project is None else self.project(hidden)
        logits[..., PAD] = -torch.inf
        return logits

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] to fp32 log-probabilities [..., V], as the loss has them: with that of pad."""
        if self.bands is not None:
            return self.bands.log_probabilities(hidden, self.output_weight)
        return F.linear(hidden, self.output_weight).float().log_softmax(-1)

    def start_alone(self, sentences: int, max_steps: int, beams: int = 1) -> Cache:
        """The cache to continue texts without an encoder with K = `beams` hypotheses each, for at most `max_steps`
        steps. Raises ValueError if those exceed `model.max_length`."""
        return Cache(self._room(sentences, max_steps, beams), [], None, beams)

    def _room(self, sentences: int, max_steps: int, beams: int) -> Tensor:
        """For the keys and values of all decoder layers."""
        limit = self.decoder.input.positions.size(0)
        if max_steps > limit:
            raise ValueError(f"{max_steps} decoding steps exceed model.max_length ({limit})")
        layers, (width, heads, _) = len(self.decoder_layers), self.shape
        return self.output_weight.new_empty(layers, 2, sentences, heads, max_steps * beams, width // heads)

    def start_cache(self, memory: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> Cache:
        """The cache to decode memory [B, S, D] with K = `beams` hypotheses each, for at most `max_steps` steps.

        Raises:
            ValueError: `max_steps` exceeds `model.max_length`.
        """
        past = self._room(len(memory), max_steps, beams)
        source = [layer.cross_attn.keys_values(memory) for layer in self.decoder_layers]
        mask = key_mask(src_lengths, memory.size(1), memory.dtype)
        if mask is not None and mask.dtype == torch.bool:  # or each layer makes it one that is added, in every step
            mask = torch.where(mask, 0.0, -torch.inf).to(memory.dtype)
        return Cache(past, source, mask, beams)

    def decoding_bytes(self, length: int, steps: int, beams: int) -> int:
        """The memory of decoding one sentence of `length` tokens, in bytes: `start_cache`'s keys and values of `steps`
        positions, and what a step and a search make beside them."""
        (width, _, inner), vocab, size = self.shape, self.target_vocab, self.output_weight.element_size()
        positions = length + steps * beams if "encoder" in self.sides else (length + steps) * beams
        cached = 2 * len(self.decoder_layers) * positions * width * size
        cached += 2 * steps * beams**2 * size  # which hypothesis continues which, and its copy when they are reordered
        # a layer at work, in the encoder with its FFN; logits, their fp32 copy, and what ranks them; tokens
        return cached + max(length, beams) * (8 * width + 2 * inner) * size + beams * (vocab * (size + 10) + 40 * steps)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Decodes one position: the last tokens [B·K] to the last layer's output [B·K, D]. Advances `cache`.

        The first tokens may be given once for all hypotheses of a sentence: [B] to [B, D].
        """
        embedded = self.table("trg")(tokens.view(cache.past.size(2), -1))
        x = self.decoder.start(self.decoder.input.step(embedded, cache.position))
        visible, slots = cache.advance(embedded.size(1))
        sources: Sequence[tuple[Tensor, Tensor] | None] = cache.source or [None] * len(cache.past)
        for layer, past, source in zip(self.decoder_layers, cache.past, sources, strict=True):
            x = layer.step(x, past, visible, source, cache.mask, slots)
        return self.decoder.norm(x).flatten(0, 1)
