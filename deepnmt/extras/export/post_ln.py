"""Folds Admin and DeepNorm stacks into plain Post-LN with the same logits (Liu et al. 2020, Appendix C).

Sub-layer i of such a stack computes LN_i(ω_i ⊙ x + F_i(x)); DeepNorm's ω_i is the number α, and with `init: published`
the closed form's a number, too. With x' = ω_i ⊙ x this is
LN_i(x' + F_i(x' / ω_i)), which is Post-LN on x'. So

- the previous norm must produce x': its gain and bias are multiplied by ω_i;
- the matrices that read x must divide: the columns of query, key and value in self-attention, of the query in
  cross-attention (keys and values read the encoder's output, which does not change), and of the first FFN matrix.

The first sub-layer has no norm before it. Its x is sqrt(D) · embedding + position, and the table may be shared with the
softmax or the other stack. So ω_1 becomes the stack's `input_gain`, a vector [D] that multiplies that sum, and tables
and tyings stay as they are. It is left out if ω_1 is 1 everywhere.

Two more blocks are Post-LN in other words: rezero_post_ln, whose factor a goes into the last matrix of each sub-layer,
and looks_linear, whose FFN reads fc1's output and its negative.

The fold is computed in float64 and rounded to fp32 once. `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import (
    Contents,
    LoadedModel,
    check_ramp,
    check_target,
    find_checkpoint,
    load_model,
    write_checkpoint,
)
from deepnmt.config import Model, Recipe, dump_recipe, with_settings
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder
from deepnmt.model.blocks import SIDES, LayerPosition, Side
from deepnmt.model.init import fill
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

# The matrices [.., D] that read the input of each sub-layer, in the order of the sub-layers.
_READERS: dict[Side, tuple[str, ...]] = {
    "encoder": ("self_attn.qkv.weight", "ffn.fc1.weight"),
    "decoder": ("self_attn.qkv.weight", "cross_attn.q.weight", "ffn.fc1.weight"),
}

LARGEST_DIFFERENCE = 1e-5  # allowed between the logits of the two models, computed in float64


@dataclass(frozen=True)
class Folded:
    """A folded checkpoint: its folder, the folded stacks, the largest difference of its logits, computed in float64,
    and the largest logit."""

    folder: Path
    stacks: list[str]
    difference: float
    largest_logit: float


def fold_run(recipe: Recipe, checkpoint: str | Path | None = None, output: str | Path | None = None) -> str:
    """Folds a run's model; returns a line on what was written and how exact it is.

    Args:
        recipe: its `run` is folded.
        checkpoint: a checkpoint or run folder to fold instead; by default the run's average, else its newest.
        output: the output folder; by default `folded` in the run folder.

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
    """The weights and model settings of a Post-LN model with the same logits as `weights` under `model`.

    Stacks of other blocks stay as they are.

    Raises:
        UserError: no stack can be folded, or an ω has a zero.
    """
    sides = [side for side in SIDES if model.stack(side).block in REWRITES]
    if not sides:
        raise UserError(f"{model.blocks}, but only {', '.join(REWRITES)} fold into post_ln; use the model as it is")
    folded = dict(weights)
    post_ln = model
    for side in sides:
        folded = REWRITES[model.stack(side).block](folded, model, side)
        gain = f"{side}.input.gain" in folded
        changes = {**model.stack(side).changes_for("post_ln"), "input_gain": gain}
        post_ln = with_settings(post_ln, {f"{side}.{name}": value for name, value in changes.items()})
    return folded, post_ln


def _fold_stack(weights: Mapping[str, Tensor], model: Model, side: Side) -> dict[str, Tensor]:
    layers, gain = f"{side}.layers.", f"{side}.input.gain"
    folded = {name: tensor for name, tensor in weights.items()
              if not (name.startswith(layers) and ".rule.omegas." in name)}
    norm = ""  # the norm before the sub-layer; the first has none
    for layer in range(model.stack(side).layers):
        for number, reader in enumerate(_READERS[side]):
            position = LayerPosition.of(model, side, layer)
            fixed = position.block.fixed_omega(position)
            if fixed is None:
                omega = weights[f"{layers}{layer}.rule.omegas.{number}"].double()
            else:
                omega = torch.full((model.shape(side).width,), fixed, dtype=torch.float64)
            if not bool((omega != 0).all()):
                raise UserError(f"ω of sub-layer {number + 1} of {layers}{layer} has a zero, so the model cannot be "
                                "written as post_ln; use the checkpoint as it is")
            matrix = f"{layers}{layer}.{reader}"
            folded[matrix] = (weights[matrix].double() / omega).float()
            if norm:
                for name in (f"{norm}.weight", f"{norm}.bias"):  # its gain, and its bias if it has one
                    if name in weights:
                        folded[name] = (weights[name].double() * omega).float()
            elif gain in weights:
                folded[gain] = (weights[gain].double() * omega).float()
            elif not bool((omega == 1).all()):
                folded[gain] = omega.float()
            norm = f"{layers}{layer}.rule.norms.{number}"
    return folded


def _scale_branches(weights: Mapping[str, Tensor], model: Model, side: Side) -> dict[str, Tensor]:
    """rezero_post_ln: LN(x + a F(x)), where a goes into the last matrix of F and its bias."""
    folded = dict(weights)
    for name in weights:
        if name.startswith(f"{side}.layers.") and name.endswith(".rule.a"):
            del folded[name]
    for name in folded:
        layer, _, last = name.partition(".layers.")
        if layer == side and last.split(".")[2] in ("out", "fc2"):
            a = weights[f"{side}.layers.{last.split('.')[0]}.rule.a"].double()
            folded[name] = (weights[name].double() * a).float()
    return folded


def _mirror_ffn(weights: Mapping[str, Tensor], model: Model, side: Side) -> dict[str, Tensor]:
    """looks_linear: the FFN's (f(h), f(-h)) is f of one matrix that also holds the negative rows. With `init:
    published` it is so already."""
    double = LayerPosition.of(model, side, 0).block.feed_forward.copies == 2  # not as its authors have it
    mirrored = dict(weights)
    if double:
        for layer in range(model.stack(side).layers):
            for name in (f"{side}.layers.{layer}.ffn.fc1.weight", f"{side}.layers.{layer}.ffn.fc1.bias"):
                mirrored[name] = torch.cat([weights[name], -weights[name]])
    return mirrored


# The blocks of which there is a Post-LN stack with the same output, and how its weights are made.
REWRITES: dict[str, Callable[[Mapping[str, Tensor], Model, Side], dict[str, Tensor]]] = {
    "admin": _fold_stack,
    "admin_closed_form": _fold_stack,
    "deepnorm": _fold_stack,
    "rezero_post_ln": _scale_branches,
    "looks_linear": _mirror_ffn,
}


def save_folded(source: Path, target: Path) -> Folded:
    """Folds the model of a checkpoint or run folder, compares the two on random sentences, and writes a checkpoint.

    Like an average it has no moments. Its recipe names post_ln for the folded stacks; vocabularies, position and scores
    are copied.

    Raises:
        UserError: see `fold_weights` and `checkpoint.load_model`; or `target` exists and is not a checkpoint; or the
            logits differ too much, as with an ω close to 0. Then nothing is written.
        FolderWriteError: it cannot be written.
    """
    target = check_target(target, "the folded model")
    make_run_folder(target.parent, "--output")
    loaded = load_model(source)
    if target.exists() and target.resolve() == loaded.folder.resolve():
        raise UserError(f"{target} is the checkpoint to fold; give another folder for the folded model")
    check_ramp(loaded.folder, loaded.recipe.model, loaded.state.update)
    before = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
    weights, model = fold_weights(before, loaded.recipe.model)
    # the profile is only for Admin, and only for its initial ω
    recipe = with_settings(loaded.recipe, {"model": model, "admin.profile": None})
    del before  # so that `_compare` can free the old weights
    difference, largest = _compare(loaded, weights, recipe)
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(f"the logits of the folded model of {loaded.folder} would differ by {difference:.1e} (the "
                        f"largest is {largest:.1f}), but at most {LARGEST_DIFFERENCE:g} is allowed: rounding the "
                        "folded weights loses too much, as with an ω close to 0; use the checkpoint as it is")
    extra: dict[str, Any] = {**loaded.state.extra, "folded": str(loaded.folder)}
    state = replace(loaded.state, loss_scale=None, extra=extra)
    write_checkpoint(target, Contents(weights, None, state, dump_recipe(recipe), loaded.files))
    old = {side: loaded.recipe.model.stack(side) for side in SIDES}
    stacks = [f"{side} ({stack.block})" for side, stack in old.items() if stack.block in REWRITES]
    return Folded(target, stacks, difference, largest)


@torch.no_grad()
def _compare(loaded: LoadedModel, weights: Mapping[str, Tensor], recipe: Recipe) -> tuple[float, float]:
    """The largest difference of the two models' logits on random sentences, and the largest logit, both absolute.

    Computed in float64, since in fp32 each model's rounding is several times the error of the fold. Frees
    `loaded.model`'s weights, to hold only one model beside the folded weights.
    """
    generator = torch.Generator().manual_seed(1)
    longest = min(24, recipe.model.max_length)
    src = torch.randint(PAD + 1, loaded.src_vocab.size, (4, longest), generator=generator)
    trg = torch.randint(PAD + 1, loaded.trg_vocab.size, (4, longest), generator=generator)
    lengths = torch.tensor([longest, longest, max(1, longest // 2), 1])

    def logits(model: Transformer) -> Tensor:
        compute_in_float64(model)
        all_logits = model.logits(model.decode(trg, model.encode(src, lengths), lengths))
        return torch.cat([all_logits[..., :PAD], all_logits[..., PAD + 1 :]], dim=-1)  # that of pad is -inf

    ours = logits(loaded.model)
    loaded.model.to("meta")  # frees its weights
    other = Transformer(recipe.model, loaded.src_vocab.size, loaded.trg_vocab.size, recipe.seed).eval()
    fill(other, weights.__getitem__)
    theirs = logits(other)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def compute_in_float64(model: Transformer) -> None:
    """Makes the model compute in float64, its layers one at a time: all at once would need 8 more bytes a parameter.
    Each layer then gets its old fp32 tensors back; allocating new ones would fragment the memory."""
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
