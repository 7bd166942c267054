"""From a recipe and its layout to an engine."""

from __future__ import annotations

from deepnmt.config import Recipe
from deepnmt.model import overrides
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.init import Initialiser
from deepnmt.model.transformer import fill_with_nan
from deepnmt.parallel.compiled import compile_layers
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Build, Engine, LocalEngine, build_of
from deepnmt.parallel.pipeline.partition import Partition, cost_units, partition
from deepnmt.processes.ranks import Ranks


def partition_of(recipe: Recipe, src_vocab: int, trg_vocab: int, ratio: float = 1.0) -> Partition:
    """Which layers each pipeline stage holds. Raises `UserError` for more stages than layers.

    `ratio`: source tokens for each target token, for which the stages are balanced.
    """
    return partition(cost_units(recipe.model, src_vocab, trg_vocab, ratio), recipe.parallel.pipeline_stages)


def start_engine(
    recipe: Recipe, layout: Layout, vocabs: tuple[int, int], ranks: Ranks, profile: AdminProfile | None = None,
    ratio: float = 1.0, initialise: bool = True,
) -> Engine:
    """The recipe's model under the engine of its layout. Collective.

    Args:
        vocabs: source and target vocabulary sizes.
        profile: the initial ω of Admin layers.
        ratio: source tokens for each target token, for which a pipeline is balanced.
        initialise: whether to set the initial weights; if not, the caller fills them with `Engine.fill`.
    """
    if layout.stages:
        from deepnmt.parallel.pipeline.engine import PipelineEngine  # importing DeepSpeed takes seconds

        _override(recipe, ranks)
        engine: Engine = PipelineEngine(recipe, vocabs, partition_of(recipe, *vocabs, ratio), layout, ranks)
        _compile(engine, recipe, ranks)
    else:
        engine = build_engine(build_of(recipe, vocabs), recipe, layout, ranks)
    if initialise:
        engine.fill(Initialiser(recipe.model, *vocabs, recipe.seed, profile.omega if profile else None))
    return engine


def build_engine(build: Build, recipe: Recipe, layout: Layout, ranks: Ranks) -> Engine:
    """The engine of a layout without a pipeline, around a whole model whose weights are still to be set. Collective."""
    _override(recipe, ranks)
    if layout.config is not None:
        from deepnmt.parallel.zero import ZeroEngine

        engine: Engine = ZeroEngine(build, recipe, layout, ranks.device)
    else:
        module = build(fill_with_nan)
        module.recompute = recipe.parallel.recompute_layers
        engine = LocalEngine(module, recipe, ranks.device)
        engine.build = build
    _compile(engine, recipe, ranks)
    return engine


def _override(recipe: Recipe, ranks: Ranks) -> None:
    overrides.restore()
    if recipe.parallel.overrides:
        ranks.raise_everywhere(lambda: overrides.use(recipe.parallel.overrides, ranks.device))


def _compile(engine: Engine, recipe: Recipe, ranks: Ranks) -> None:
    if recipe.parallel.compile:
        ranks.raise_everywhere(lambda: compile_layers(engine.module, ranks.device))
