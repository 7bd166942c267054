"""An encoder alone, with BERT's input: the trunk of several tasks.

`B` sequences, `S` length, `D` width, `V` vocabulary. Parameters: `embeddings.tokens.weight`,
`encoder.input.positions.weight`, `encoder.layers.11.ffn.fc1.weight`, `encoder.norm.weight`; a task adds its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config.encoders import EncoderModel
from deepnmt.model.blocks import LayerPosition
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.init import Initialiser, generator_for
from deepnmt.model.loss import LossSums
from deepnmt.model.sublayers import key_mask
from deepnmt.model.transformer import build_layer, build_top, fill_with_nan, run_layers, stream_start
from deepnmt.model.unfilled import unfilled
from deepnmt.tokens import PAD

SEGMENTS = 2  # of a sequence at most: the first and the second text of a pair
HeadOf = Callable[[EncoderModel, int], nn.Module]  # from the settings and the size of the vocabulary


class EncoderInput(nn.Module):
    """dropout(norm(token + position + segment)), trained vectors all three. Devlin et al. 2019, BERT, figure 2."""

    def __init__(self, model: EncoderModel, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.positions = unfilled(nn.Embedding, model.max_length, model.width)
        self.segments = unfilled(nn.Embedding, SEGMENTS, model.width)
        position = LayerPosition.of(model.of_layers, "encoder", 0)
        self.register_module("norm", position.norm() if model.input_norm else None)
        self.dropout = Dropout(model.dropout)

    def forward(self, embedded: Tensor, segments: Tensor, dropout_key: int) -> Tensor:
        """Embeddings [B, S, D] and segments [B, S] to the stack's input [B, S, D]. Raises ValueError if S exceeds
        `model.max_length`."""
        length, limit = embedded.size(1), self.positions.num_embeddings
        if length > limit:
            raise ValueError(f"a sequence of {length} tokens exceeds model.max_length ({limit})")
        x = embedded + self.positions(torch.arange(length, device=embedded.device)) + self.segments(segments)
        if isinstance(self.norm, nn.Module):
            x = self.norm(x)
        if self.training and self.dropout.p > 0:
            seed_dropout(x.device, self.seed, dropout_key, "encoder.input")
        return self.dropout(x)


class EncoderLayers(nn.Module):
    """The input, the layers and the block's top."""

    def __init__(self, model: EncoderModel, seed: int, after_build: Callable[[nn.Module], None]) -> None:
        super().__init__()
        plain = model.of_layers
        self.input = EncoderInput(model, seed)
        after_build(self.input)
        self.layers = nn.ModuleList()
        for index in range(model.encoder.layers):
            layer = build_layer(plain, "encoder", index, seed)
            after_build(layer)
            self.layers.append(layer)
        self.norm = build_top(plain, "encoder")
        after_build(self.norm)
        self.start = stream_start(plain, "encoder")


class Encoder(nn.Module):
    """A task's model, without weights: `init.fill` sets them. A subclass has a `forward` from a batch to its
    `LossSums`.

    Args:
        seed: with the `dropout_key` of each call it fixes the dropout masks.
        head: makes what stands above the encoder.
        after_build: see `Transformer`.
    """

    def __init__(
        self, model: EncoderModel, vocab: int, seed: int, head: HeadOf,
        after_build: Callable[[nn.Module], None] = fill_with_nan,
    ) -> None:
        super().__init__()
        self.seed, self.recompute = seed, 0
        self.embeddings = nn.ModuleDict({"tokens": unfilled(nn.Embedding, vocab, model.width)})
        after_build(self.embeddings["tokens"])
        self.encoder = EncoderLayers(model, seed, after_build)
        self.head = head(model, vocab)
        after_build(self.head)
        for part in self.modules():
            if isinstance(part, nn.LayerNorm | nn.RMSNorm):
                part.eps = model.norm_eps

    def encode(self, batch: Batch) -> Tensor:
        """The tensors src [B, S], src_lengths [B] and, for pairs, segments [B, S] of a micro-batch to [B, S, D]; values
        at padding have no meaning."""
        src = batch["src"]
        segments = batch["segments"] if "segments" in batch else torch.zeros_like(src)
        embedded = self.embeddings["tokens"](src)
        x = self.encoder.start(self.encoder.input(embedded, segments, batch.key))
        mask = key_mask(batch["src_lengths"], src.size(1), embedded.dtype)
        x = run_layers(list(self.encoder.layers), self.recompute, x, mask, batch.key)
        return cast(Tensor, self.encoder.norm(x))

    @property
    def table(self) -> Tensor:
        """The embedding table [V, D]."""
        return cast(nn.Embedding, self.embeddings["tokens"]).weight


def class_losses(logits: Tensor, targets: Tensor, smoothing: float) -> LossSums:
    """The sums over rows of logits [R, K] in fp32, whose classes are targets [R]."""
    loss = nll = F.cross_entropy(logits, targets, reduction="sum")
    if smoothing:
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return LossSums(loss, nll.detach())


class EncoderInitialiser:
    """A `Source` of a run's initial weights, which depend on (seed, name) alone: BERT's normal distribution for tables
    and matrices (`model.initial_std`), 0 for biases, 1 for gains of norms, and what `Initialiser` has for all else of
    the layers.

    Args:
        shapes: of all parameters.
    """

    def __init__(self, model: EncoderModel, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self.model, self.shapes, self.seed = model, shapes, seed
        self._of_layers = Initialiser(model.of_layers, 1, 1, seed)

    def __call__(self, name: str) -> Tensor:
        shape, own_matrices = self.shapes[name], self.model.encoder.init == "auto"
        in_layers = name.startswith(("encoder.layers.", "encoder.norm."))
        if in_layers and (".rule." in name or len(shape) < 2 or not own_matrices):
            return self._of_layers(name)
        if len(shape) < 2:
            return torch.tensor({"weight": 1.0, "bias": 0.0}[name.rpartition(".")[2]])
        std, weight = self.model.initial_std, torch.empty(shape)
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator_for(self.seed, name))
        if name == "embeddings.tokens.weight":
            weight[PAD] = 0
        return weight
