"""The model: a Transformer whose encoder reads frames.

`B` utterances, `F` frames, `S` = F / 4 positions, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.config import Recipe
from deepnmt.model.init import Initialiser, Source, generator_for
from deepnmt.model.objective import Objective, objective_of
from deepnmt.model.transformer import Transformer, fill_with_nan
from deepnmt.model.unfilled import unfilled
from deepnmt.parallel.engine import Build
from deepnmt.tasks.speech.filterbanks import BINS
from deepnmt.tasks.speech.settings import SHORTER, SpeechModel
from deepnmt.tokens import PAD


class Convolutions(nn.Module):
    """Two convolutions over time of stride 2, each with a gate: GLU(x) = a · σ(b) (Dauphin et al. 2017). Synnaeve et
    al. 2020, End-to-end ASR; B2T, section 6.4."""

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        width, sides = model.shape("encoder").width, model.kernel // 2
        self.first = unfilled(nn.Conv1d, BINS, model.channels, model.kernel, 2, sides)
        self.second = unfilled(nn.Conv1d, model.channels // 2, 2 * width, model.kernel, 2, sides)

    def forward(self, frames: Tensor, positions: Tensor) -> Tensor:
        """frames [B, F, 80], zeros as padding, to [B, S, D]. Between the two padding is 0 again, as if not there."""
        x = F.glu(self.first(frames.to(self.first.weight.dtype).transpose(1, 2)), dim=1)
        there = torch.arange(x.size(2), device=x.device) < 2 * positions[:, None]
        return F.glu(self.second(x * there[:, None]), dim=1).transpose(1, 2)


class SpeechTransformer(Transformer):
    """For the arguments see `Transformer`; `vocab` is that of the transcripts."""

    def __init__(
        self, model: SpeechModel, vocab: int, seed: int, objective: Objective | None = None,
        after_build: Callable[[nn.Module], None] = fill_with_nan,
    ) -> None:
        super().__init__(model, vocab, vocab, seed, objective, after_build)
        self.convolutions = Convolutions(model)
        after_build(self.convolutions)

    def embed(self, src: Tensor, src_lengths: Tensor) -> Tensor:
        return cast(Tensor, self.convolutions(src, src_lengths))

    @staticmethod
    def smallest_batch(device: torch.device) -> Batch:
        """One utterance of two positions and two tokens, for an update that must not change the weights."""
        ids = torch.full((1, 2), PAD + 1, device=device)
        tensors = torch.zeros(1, 2 * SHORTER, BINS, device=device), torch.tensor([2], device=device), ids, ids
        return Batch(dict(zip(TRANSLATION, tensors, strict=True)), key=0, tokens=2)


def build_of(recipe: Recipe, vocab: int) -> Build:
    """Builds the recipe's model."""
    model: Any = recipe.model
    return lambda after_build: SpeechTransformer(model, vocab, recipe.seed, objective_of(recipe), after_build)


def initial_weights(recipe: Recipe, vocab: int) -> Source:
    """The initial weights: those of translation, and convolutions uniform in ±1/√inputs, PyTorch's own."""
    model = cast(SpeechModel, recipe.model)
    rest = Initialiser(model, vocab, vocab, recipe.seed)
    channels = {"first": (model.channels, BINS), "second": (2 * model.shape("encoder").width, model.channels // 2)}

    def source(name: str) -> Tensor:
        part, _, which = name.partition(".")
        if part != "convolutions":
            return rest(name)
        convolution, _, kind = which.partition(".")
        outputs, inputs = channels[convolution]
        shape = (outputs, inputs, model.kernel) if kind == "weight" else (outputs,)
        bound = (inputs * model.kernel) ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator_for(recipe.seed, name))

    return source
