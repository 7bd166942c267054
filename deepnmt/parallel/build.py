"""From a recipe to an engine."""

from __future__ import annotations

from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.ds_config import DsConfig, load_ds_config
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.launch import Ranks
from deepnmt.parallel.local import LocalEngine


def check_layout(recipe: Recipe, world: int) -> DsConfig | None:
    """The completed DeepSpeed configuration, or None for the local engine.

    Raises:
        UserError: a faulty configuration, or several processes without one.
    """
    if recipe.parallel.ds_config is None:
        if world > 1:
            raise UserError(f"parallel.ds_config is null, which is the engine of one process, but {world} were "
                            "started; set parallel.ds_config=ds_configs/zero1_fp32.json or start one process")
        return None
    return load_ds_config(recipe.parallel.ds_config, recipe, world)


def build_engine(module: Transformer, recipe: Recipe, ranks: Ranks) -> Engine:
    """Puts the model under the engine that the recipe names. Collective."""
    settings = check_layout(recipe, ranks.world)
    if settings is None:
        return LocalEngine(module, recipe, ranks.device)
    from deepnmt.parallel.zero import ZeroEngine  # importing DeepSpeed takes seconds: only where it is used

    return ZeroEngine(module, recipe, settings, ranks.device)
