"""What a user might try in place of a recipe that will not train: recipes that differ from it in one thing each."""

from __future__ import annotations

from deepnmt.config import Model, Recipe
from deepnmt.doctor.fresh import initialisation, with_blocks, with_init
from deepnmt.model.blocks import BLOCKS

_FACTORS = (1 / 10, 1 / 3, 3, 10)  # on the rate: one that is too small fails as well as one that is too large


def alternatives(recipe: Recipe, knows_batches: bool) -> dict[str, Recipe]:
    """Other recipes, by what one would write on the line to get them.

    Args:
        knows_batches: whether larger batches are among them; only for a rule that was fitted on several sizes.
    """
    found = {}
    for factor in _FACTORS:
        optimizer = recipe.optimizer.model_copy(update={"lr": recipe.optimizer.lr * factor})
        found[f"optimizer.lr={optimizer.lr:.3g}"] = recipe.model_copy(update={"optimizer": optimizer})
    end = recipe.schedule.step_update or recipe.train.updates
    if recipe.schedule.warmup == 0 and end > 1:
        warmup = max(1, min(recipe.train.updates // 10, end - 1))
        schedule = recipe.schedule.model_copy(update={"warmup": warmup})
        found[f"schedule.warmup={schedule.warmup}"] = recipe.model_copy(update={"schedule": schedule})
    if knows_batches:
        batch = recipe.batch.model_copy(update={"accumulation": 4 * recipe.batch.accumulation})
        found[f"batch.accumulation={batch.accumulation}"] = recipe.model_copy(update={"batch": batch})
    model = recipe.model
    stacks = (model.encoder, model.decoder)
    others: dict[str, Model] = {}
    if not all(initialisation(stack.block, stack.init) == "depth_scaled" for stack in stacks):
        others["model.encoder.init=depth_scaled model.decoder.init=depth_scaled"] = with_init(model, "depth_scaled")
    for block, made in BLOCKS.items():
        if made.made_for_depth and any(stack.block != block for stack in stacks):
            others[f"model.encoder.block={block} model.decoder.block={block}"] = with_blocks(model, block, block)
    for line, other in others.items():
        changed = recipe.model_copy(update={"model": other})
        if recipe.admin.profile is not None:  # measured on the model as it was
            line += " admin.profile=null"
            changed = changed.model_copy(update={"admin": recipe.admin.model_copy(update={"profile": None})})
        found[line] = changed
    return found
