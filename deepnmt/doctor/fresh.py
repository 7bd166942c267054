"""A model as training would begin with it: its initial weights, and Admin's ω measured on given batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepnmt.batch import Batch
from deepnmt.config import Init, Model
from deepnmt.errors import UserError
from deepnmt.model.admin import AdminProfile, InputVariance, measure
from deepnmt.model.blocks import BLOCKS
from deepnmt.model.transformer import Transformer


def fresh_model(
    model: Model,
    src_vocab: int,
    trg_vocab: int,
    seed: int,
    batches: Sequence[Batch],
    *,
    label_smoothing: float = 0.0,
    input_variance: InputVariance = "measured",
    profile: AdminProfile | None = None,
) -> Transformer:
    """Builds the model on the batches' device; where a stack is Admin, the batches are profiled first, unless a
    `profile` is given."""
    built = Transformer(model, src_vocab, trg_vocab, seed, label_smoothing)
    if model.profiled:
        measured = profile or measure(model, src_vocab, trg_vocab, seed, batches, input_variance=input_variance)
        measured.apply(built)
    return built.to(batches[0].device if batches else torch.device("cpu"))


def with_depth(model: Model, encoder: int, decoder: int) -> Model:
    """The same model with other depths."""
    tree = model.model_dump()
    tree["encoder"]["layers"], tree["decoder"]["layers"] = encoder, decoder
    return Model.model_validate(tree)


def with_blocks(model: Model, encoder: str, decoder: str) -> Model:
    """The same model with other blocks."""
    tree = model.model_dump()
    tree["encoder"]["block"], tree["decoder"]["block"] = encoder, decoder
    return Model.model_validate(tree)


def with_init(model: Model, init: str) -> Model:
    """The same model with another initialisation of both stacks."""
    tree = model.model_dump()
    tree["encoder"]["init"] = tree["decoder"]["init"] = init
    return Model.model_validate(tree)


def initialisation(block: str, init: Init) -> str:
    """What `init` comes to with a block: `xavier`, `xavier_separate` or `depth_scaled`."""
    if init == "auto":
        return "depth_scaled" if BLOCKS[block].depth_scaled else "xavier"
    return "xavier" if init == "xavier_separate" and not BLOCKS[block].fused else init


def block_pair(word: str) -> tuple[str, str]:
    """Encoder and decoder block of a word: `admin`, or `post_ln/pre_ln`. Raises `UserError` for an unknown block."""
    encoder, _, decoder = word.partition("/")
    for block in (encoder, decoder or encoder):
        if block not in BLOCKS:
            raise UserError(f"there is no block {block!r}; known: {', '.join(BLOCKS)}; two with a / between them are "
                            "encoder and decoder")
    return encoder, decoder or encoder
