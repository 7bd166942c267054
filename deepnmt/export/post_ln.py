"""Folding: Admin and DeepNorm stacks into plain Post-LN, with the same logits. Liu et al. 2020, Appendix C.

Sub-layer i of such a stack computes LN_i(ω_i ⊙ x + F_i(x)); DeepNorm's ω_i is the number α. Written in x' = ω_i ⊙ x
that is LN_i(x' + F_i(x' / ω_i)), so

- what makes x gives x' instead: gain and bias of the norm before are multiplied by ω_i,
- what reads x divides: the columns of query, key and value in self-attention, of query alone in cross-attention (its
  keys and values read the encoder's output, which stays as it is), and of the first FFN matrix.

Before the first sub-layer there is no norm. Its x is sqrt(D) · embedding + position: the table may also be the
softmax's or the other stack's, and the positions are fixed. So ω_1 becomes the stack's `input_gain`, a vector of D
numbers on that sum, and tables and tyings stay as they are; where ω_1 is 1 throughout it is left out.

Computed in float64, rounded to fp32 once, which is all that the logits differ by but for the rounding of fp32
arithmetic, which no two models share. `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import (
    Contents,
    LoadedModel,
    check_target,
    find_checkpoint,
    load_model,
    write_checkpoint,
)
from deepnmt.config import Model, Recipe, dump_recipe, with_settings
from deepnmt.errors import UserError
from deepnmt.model.blocks import BLOCKS, FOLDED, SIDES, DeepNorm, LayerPosition, Side
from deepnmt.model.init import fill
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

FOLDABLE = [name for name, block in BLOCKS.items() if block.foldable]

# The matrices [.., D] that read a sub-layer's x, in the order of the sub-layers.
_READERS: dict[Side, tuple[str, ...]] = {
    "encoder": ("self_attn.qkv.weight", "ffn.fc1.weight"),
    "decoder": ("self_attn.qkv.weight", "cross_attn.q.weight", "ffn.fc1.weight"),
}

LARGEST_DIFFERENCE = 1e-5  # of the logits, both models computed in float64


@dataclass(frozen=True)
class Folded:
    """A folded checkpoint: its folder, the stacks that were folded, and how far its logits, computed in float64, were
    seen to differ."""

    folder: Path
    stacks: list[str]
    difference: float
    largest_logit: float


def fold_run(recipe: Recipe, checkpoint: str | Path | None = None, output: str | Path | None = None) -> str:
    """Folds and returns a line that says what was written and how exact it is.

    Args:
        recipe: whose `run` is folded.
        checkpoint: a checkpoint or run folder to be folded in its place; without, the run's average, else its newest.
        output: the folder written; without, `folded` in the run folder.

    Raises:
        UserError: see `save_folded`.
    """
    target = Path(output) if output is not None else Path(recipe.run) / "folded"
    source = find_checkpoint(Path(checkpoint or recipe.run))
    warn_if_outdated(source)
    folded = save_folded(source, target)
    return (f"{folded.folder}: {' and '.join(folded.stacks)} as post_ln; logits of random sentences differ by at most "
            f"{folded.difference:.1e} in float64 (the largest is {folded.largest_logit:.1f})")


def fold_weights(weights: Mapping[str, Tensor], model: Model) -> tuple[dict[str, Tensor], Model]:
    """The weights and the shapes of a Post-LN model that computes what `weights` compute under `model`.

    Stacks of other blocks stay as they are.

    Raises:
        UserError: no stack can be folded, or an ω has a zero, by which nothing can be divided.
    """
    sides = [side for side in SIDES if model.stack(side).block in FOLDABLE]
    if not sides:
        raise UserError(f"model.encoder.block is {model.encoder.block} and model.decoder.block {model.decoder.block}, "
                        f"but only {', '.join(FOLDABLE)} fold into post_ln; the others are used as they are")
    folded = dict(weights)
    post_ln = model
    for side in sides:
        folded = _fold_stack(folded, model, side)
        gain = f"{side}.input.gain" in folded
        post_ln = with_settings(post_ln, {f"{side}.block": FOLDED, f"{side}.input_gain": gain})
    return folded, post_ln


def _fold_stack(weights: Mapping[str, Tensor], model: Model, side: Side) -> dict[str, Tensor]:
    layers, gain = f"{side}.layers.", f"{side}.input.gain"
    folded = {name: tensor for name, tensor in weights.items()
              if not (name.startswith(layers) and ".rule.omegas." in name)}
    norm = ""  # before the sub-layer; none before the first
    for layer in range(model.stack(side).layers):
        for number, reader in enumerate(_READERS[side]):
            if BLOCKS[model.stack(side).block] is DeepNorm:
                alpha = DeepNorm.constants(LayerPosition.of(model, side, layer))[0]
                omega = torch.full((model.width,), alpha, dtype=torch.float64)
            else:
                omega = weights[f"{layers}{layer}.rule.omegas.{number}"].double()
            if not bool((omega != 0).all()):
                raise UserError(f"ω of sub-layer {number + 1} of {layers}{layer} holds a zero, so its model has "
                                "no plain post_ln form; use the checkpoint as it is")
            matrix = f"{layers}{layer}.{reader}"
            folded[matrix] = (weights[matrix].double() / omega).float()
            if norm:
                for name in (f"{norm}.weight", f"{norm}.bias"):  # its gain and, where it has one, its bias
                    if name in weights:
                        folded[name] = (weights[name].double() * omega).float()
            elif gain in weights:
                folded[gain] = (weights[gain].double() * omega).float()
            elif not bool((omega == 1).all()):
                folded[gain] = omega.float()
            norm = f"{layers}{layer}.rule.norms.{number}"
    return folded


def save_folded(source: Path, target: Path) -> Folded:
    """Folds the model of a checkpoint or run folder, compares both on random sentences, and writes it as a checkpoint.

    Like an average it has no moments. Its `recipe.yaml` says post_ln for the folded stacks; vocabularies, position and
    scores stay.

    Raises:
        UserError: see `fold_weights` and `checkpoint.load_model`; `target` is something else than a checkpoint; the
            logits differ too much, as with an ω close to 0. Nothing is written then.
        CheckpointWriteError: it cannot be written.
    """
    check_target(target, "the folded model")
    loaded = load_model(source)
    if target.exists() and target.resolve() == loaded.folder.resolve():
        raise UserError(f"{target} is the checkpoint to be folded; give another folder for the folded model")
    before = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
    weights, model = fold_weights(before, loaded.recipe.model)
    # the profile is of Admin alone, and has done its work
    recipe = with_settings(loaded.recipe, {"model": model, "admin.profile": None})
    del before  # what was folded has no other owner than the model, see `_compare`
    difference, largest = _compare(loaded, weights, recipe)
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(f"the folded model of {loaded.folder} would differ by {difference:.1e} in its logits, of which "
                        f"the largest is {largest:.1f}, above {LARGEST_DIFFERENCE:g}: rounding the folded weights "
                        "costs too much, as where an ω is too close to 0; use the checkpoint as it is")
    extra: dict[str, Any] = {**loaded.state.extra, "folded": str(loaded.folder)}
    state = replace(loaded.state, loss_scale=None, extra=extra)
    write_checkpoint(target, Contents(weights, None, state, dump_recipe(recipe), loaded.files))
    stacks = [f"{side} ({loaded.recipe.model.stack(side).block})" for side in SIDES
              if loaded.recipe.model.stack(side).block in FOLDABLE]
    return Folded(target, stacks, difference, largest)


@torch.no_grad()
def _compare(loaded: LoadedModel, weights: Mapping[str, Tensor], recipe: Recipe) -> tuple[float, float]:
    """The largest difference of the logits on random sentences, and the largest logit, both as magnitudes.

    In float64: in fp32 either model's own rounding is several times what the fold does. `loaded.model` is used up, to
    have one model at a time beside the folded weights.
    """
    generator = torch.Generator().manual_seed(1)
    longest = min(24, recipe.model.max_length)
    src = torch.randint(PAD + 1, loaded.src_vocab.size, (4, longest), generator=generator)
    trg = torch.randint(PAD + 1, loaded.trg_vocab.size, (4, longest), generator=generator)
    lengths = torch.tensor([longest, longest, max(1, longest // 2), 1])

    def logits(model: Transformer) -> Tensor:
        _compute_in_float64(model)
        all_logits = model.logits(model.decode(trg, model.encode(src, lengths), lengths))
        return torch.cat([all_logits[..., :PAD], all_logits[..., PAD + 1 :]], dim=-1)  # that of pad is -inf

    ours = logits(loaded.model)
    loaded.model.to("meta")  # which holds no numbers
    other = Transformer(recipe.model, loaded.src_vocab.size, loaded.trg_vocab.size, recipe.seed).eval()
    fill(other, weights.__getitem__)
    theirs = logits(other)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def _compute_in_float64(model: Transformer) -> None:
    """Changes the model so, with layers of fp32 that are float64 only while they compute: all at once would be 8 more
    bytes a parameter. The fp32 tensors stay where they are, since others in their places would leave holes between."""
    narrow: list[Tensor] = []

    def widen(layer: nn.Module, _: object) -> None:
        narrow.extend(parameter.data for parameter in layer.parameters())
        layer.double()

    def put_back(layer: nn.Module, *_: object) -> None:
        for parameter, tensor in zip(layer.parameters(), narrow, strict=True):
            parameter.data = tensor
        narrow.clear()

    model.embeddings.double()
    for stack in (model.encoder, model.decoder):
        stack.input.double()
        stack.norm.double()
        for layer in stack.layers:
            layer.register_forward_pre_hook(widen)
            layer.register_forward_hook(put_back)
