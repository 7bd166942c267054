"""Fresh models, and variants of a recipe that a user might try instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from deepnmt.batch import Batch
from deepnmt.config import Admin, Model, Recipe, choices, on_command_line, with_settings
from deepnmt.config.choices import facts_of
from deepnmt.errors import UserError
from deepnmt.model.admin_profile import AdminProfile, measure
from deepnmt.model.blocks import BLOCKS, SIDES, set_clock
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from deepnmt.optim.groups import is_frozen
from deepnmt.tasks.translation.collapse import SLOW_LAYERS, slower, slower_encoder
from deepnmt.training.fine_tuning import check_parts

BF16 = "parallel.precision=bf16"  # as on the command line
_LOWER, _HIGHER = (1 / 3, 1 / 10), (3, 10)  # times the learning rate: one that is too small fails, too


def fresh_model(
    model: Model,
    src_vocab: int,
    trg_vocab: int,
    seed: int,
    batches: Sequence[Batch],
    *,
    label_smoothing: float = 0.0,
    admin: Admin | None = None,
    profile: AdminProfile | None = None,
) -> Transformer:
    """A model with its initial weights, as its first update finds it, on the batches' device. If a stack is Admin and
    no `profile` is given, Admin is profiled on the batches first, as `admin` says."""
    if model.profiled and profile is None:
        profile = measure(model, src_vocab, trg_vocab, seed, batches, settings=admin)
    omega = profile.omega if profile else None
    device = batches[0].device if batches else torch.device("cpu")
    fresh = new_model(model, src_vocab, trg_vocab, seed, label_smoothing, omega).to(device)
    set_clock(fresh, 1)
    return fresh


def initialisation(block: str, init: str) -> str:
    """The initial weights that `init` means for a block: `xavier`, `xavier_separate`, `depth_scaled`, `published` or
    `fairseq`."""
    if init == "auto" or (init == "published" and not facts_of(block).published):
        return "depth_scaled" if BLOCKS[block].depth_scaled else "xavier"
    if init == "xavier_separate" and not BLOCKS[block].fused_qkv:
        return "xavier"
    return init


def alternatives(recipe: Recipe) -> dict[str, Recipe]:
    """Variants of a recipe that is predicted to fail, each with one change, what has helped most first (collapsed
    encoders: docs/guide/when_a_run_fails.md); the keys are the settings as on the command line."""
    model, optimizer = recipe.model, recipe.optimizer
    stacks = (model.encoder, model.decoder)
    remeasured: dict[str, Any] = {}
    if recipe.admin.profile is not None:  # a profile file fits only the model it was measured on
        remeasured["admin.profile"] = None

    def with_blocks(blocks: Iterable[str]) -> list[dict[str, Any]]:
        changes = []
        for block in blocks:
            if model.encoder.block == block and model.decoder.block == block:
                continue
            settings: dict[str, Any] = {}
            for side in SIDES:
                for name, value in model.stack(side).changes_for(block).items():
                    settings[f"model.{side}.{name}"] = value
            changes.append(settings | remeasured)
        return changes

    slow: list[dict[str, Any]] = []
    if not is_frozen("encoder", recipe.train.freeze):
        slow.append(slower_encoder(recipe))
        lr_factors = optimizer.lr_factors
        for side, share in reversed(SLOW_LAYERS.items()):
            if not is_frozen(side, recipe.train.freeze):
                lr_factors = slower(lr_factors, side, share)
        slow.append({"optimizer.lr_factors": lr_factors})
    lower = [{"optimizer.lr": optimizer.lr * factor} for factor in _LOWER]
    early = with_blocks(choices.BLOCKS.where(lambda block: block.learns_early))
    # An encoder without norms keeps its tokens apart by itself, but for the rate.
    tried: list[dict[str, Any]] = [*early, *lower, *slow]
    if BLOCKS[model.encoder.block].layer_norms:
        tried = [*slow, *early, *lower]
    end = recipe.schedule.step_update or recipe.train.updates
    if recipe.schedule.warmup == 0 and end > 1:
        tried.append({"schedule.warmup": max(1, min(recipe.train.updates // 10, end - 1))})
    if not all(initialisation(stack.block, stack.init) == "depth_scaled" for stack in stacks):
        tried.append({f"model.{side}.init": "depth_scaled" for side in SIDES} | remeasured)
    tried += with_blocks(choices.BLOCKS.where(lambda block: block.made_for_depth and not block.learns_early))
    tried += [{"optimizer.lr": optimizer.lr * factor} for factor in _HIGHER]
    variants = {}
    for settings in tried:
        # Another setting rules it out, as model.tuned_at does most blocks, or names a part that this block lacks.
        with suppress(ValueError, UserError):
            variant = with_settings(recipe, settings)
            check_parts(variant)
            variants[on_command_line(settings)] = variant
    return variants
