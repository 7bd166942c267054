"""From a recipe and its layout to an engine."""

from __future__ import annotations

from deepnmt.config import Recipe
from deepnmt.model.admin import AdminProfile
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.local import LocalEngine
from deepnmt.parallel.pipeline.partition import Partition, cost_units, partition
from deepnmt.parallel.settings import Layout
from deepnmt.ranks import Ranks


def partition_of(recipe: Recipe, src_vocab: int, trg_vocab: int, ratio: float = 1.0) -> Partition:
    """The pipeline's stages; `ratio`: source tokens for each target token. `UserError` for more stages than layers."""
    return partition(cost_units(recipe.model, src_vocab, trg_vocab, ratio), recipe.parallel.pipeline_stages)


def start_engine(
    recipe: Recipe, layout: Layout, vocabs: tuple[int, int], ranks: Ranks, profile: AdminProfile | None = None,
    ratio: float = 1.0,
) -> Engine:
    """The recipe's model, its weights drawn and ω placed, under the engine of its layout. Collective.

    Args:
        vocabs: source and target vocabulary sizes.
        profile: what Admin layers start from.
        ratio: source tokens for each target token, which a pipeline is balanced for.
    """
    if layout.stages:
        cuts = partition_of(recipe, *vocabs, ratio)
        from deepnmt.parallel.pipeline.engine import PipelineEngine

        return PipelineEngine(recipe, vocabs, cuts, layout, ranks, profile)
    model = Transformer(recipe.model, *vocabs, recipe.seed, recipe.train.label_smoothing)
    if profile is not None:
        profile.apply(model)
    return build_engine(model, recipe, layout, ranks)


def build_engine(module: Transformer, recipe: Recipe, layout: Layout, ranks: Ranks) -> Engine:
    """Puts a whole model under the engine of a layout (no pipeline). Collective."""
    module.recompute = recipe.parallel.recompute_layers
    if layout.config is None:
        return LocalEngine(module, recipe, ranks.device)
    from deepnmt.parallel.zero import ZeroEngine  # importing DeepSpeed takes seconds: only where it is used

    return ZeroEngine(module, recipe, layout, ranks.device)
