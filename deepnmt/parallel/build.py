"""From a recipe to an engine."""

from __future__ import annotations

from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.model.admin import AdminProfile
from deepnmt.model.blocks import BLOCKS
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.local import LocalEngine
from deepnmt.parallel.pipeline.partition import Partition, check_stages, cost_units, partition
from deepnmt.parallel.settings import DsConfig, load_ds_config
from deepnmt.ranks import Ranks


def check_layout(recipe: Recipe, world: int) -> DsConfig | None:
    """The completed DeepSpeed configuration, or None for the local engine.

    Raises:
        UserError: a faulty configuration, several processes without one, or a pipeline that cannot be.
    """
    stages = recipe.parallel.pipeline_stages
    if recipe.parallel.ds_config is None:
        if stages:
            raise UserError(
                f"parallel.pipeline_stages is {stages}, but parallel.ds_config is null, which is the engine of one "
                "whole model; set parallel.ds_config=ds_configs/pipeline_zero1_fp32.json"
            )
        if world > 1:
            raise UserError(
                f"parallel.ds_config is null, which is the engine of one process, but {world} were "
                "started; set parallel.ds_config=ds_configs/zero1_fp32.json or start one process"
            )
        return None
    for side, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
        if stages and BLOCKS[stack.block].needs_history:
            raise UserError(
                f"model.{side}.block is {stack.block}, whose layers read the outputs of all layers below, but "
                f"parallel.pipeline_stages is {stages}, and stages pass on the last layer's output alone; set "
                "parallel.pipeline_stages=0, or choose another block"
            )
    check_stages(stages, recipe.model.encoder.layers, recipe.model.decoder.layers)
    if stages and world % stages:
        near = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but {world} process{'es' if world > 1 else ''} cannot be shared "
            f"among {stages} stages evenly; start a multiple of {stages}, or set it to one of {near}"
        )
    settings = load_ds_config(recipe.parallel.ds_config, recipe, data_ranks(recipe, world))
    if stages and settings.stage > 1:
        raise UserError(
            f"parallel.pipeline_stages is {stages} and {recipe.parallel.ds_config} has ZeRO stage {settings.stage}, "
            "but pipelines keep whole gradients and weights on each stage, so they take ZeRO 0 or 1; set "
            "parallel.ds_config=ds_configs/pipeline_zero1_fp32.json"
        )
    return settings


def data_ranks(recipe: Recipe, world: int) -> int:
    """Processes that compute on different micro-batches: all of them, in a pipeline one for each chain of stages."""
    return world // (recipe.parallel.pipeline_stages or 1)


def cut(recipe: Recipe, src_vocab: int, trg_vocab: int, ratio: float = 1.0) -> Partition:
    """The pipeline's stages; `ratio`: source tokens for each target token. `UserError` for more stages than layers."""
    return partition(cost_units(recipe.model, src_vocab, trg_vocab, ratio), recipe.parallel.pipeline_stages)


def start_engine(
    recipe: Recipe, vocabs: tuple[int, int], ranks: Ranks, profile: AdminProfile | None = None, ratio: float = 1.0
) -> Engine:
    """The recipe's model, its weights drawn and ω placed, under the engine that the recipe names. Collective.

    Args:
        vocabs: source and target vocabulary sizes.
        profile: what Admin layers start from.
        ratio: source tokens for each target token, which a pipeline is balanced for.
    """
    if recipe.parallel.pipeline_stages:
        settings = check_layout(recipe, ranks.world)
        assert settings is not None
        cuts = cut(recipe, *vocabs, ratio)
        from deepnmt.parallel.pipeline.engine import PipelineEngine

        return PipelineEngine(recipe, vocabs, cuts, settings, ranks, profile)
    model = Transformer(recipe.model, *vocabs, recipe.seed, recipe.train.label_smoothing)
    if profile is not None:
        profile.apply(model)
    return build_engine(model, recipe, ranks)


def build_engine(module: Transformer, recipe: Recipe, ranks: Ranks) -> Engine:
    """Puts a whole model under the engine that the recipe names (no pipeline). Collective."""
    settings = check_layout(recipe, ranks.world)
    module.recompute = recipe.parallel.recompute_layers
    if settings is None:
        return LocalEngine(module, recipe, ranks.device)
    from deepnmt.parallel.zero import ZeroEngine  # importing DeepSpeed takes seconds: only where it is used

    return ZeroEngine(module, recipe, settings, ranks.device)
