"""How a run of a Transformer starts, whatever its task: fresh, profiled, or with the weights of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepnmt.config import Recipe
from deepnmt.data.vocab import Vocabulary
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.parallel.build import partition_of, start_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.training.dry_run import check_memory
from deepnmt.training.fine_tuning import trained_weights
from deepnmt.training.profile import save_profile


def start_transformer(
    recipe: Recipe, layout: Layout, vocabs: tuple[Vocabulary, Vocabulary], ranks: Ranks, initialise: bool,
    profile_of: Callable[[], AdminProfile | None], ratio: float = 1.0,
) -> Engine:
    """The engine of the recipe's model; with `initialise` its weights are the initial ones, or those of
    `train.init_from`. Collective.

    Args:
        profile_of: measures or reads the profile of a fresh model; None: it has no Admin stacks.
        ratio: source tokens for each target token.

    Raises:
        UserError: on every process; the model does not fit into memory, or there is no model to begin with.
    """
    sizes = (vocabs[0].size, vocabs[1].size)
    ranks.raise_everywhere(lambda: check_memory(recipe, layout, sizes, ratio, ranks))
    trained = None
    if initialise and recipe.train.init_from:
        trained = trained_weights(recipe, vocabs, ranks)
    fresh = initialise and trained is None
    profile = None
    if fresh:
        profile = profile_of()
    if profile is not None:
        ranks.raise_everywhere(lambda: save_profile(profile, Path(recipe.run)) if ranks.first else None)
    if layout.stages and ranks.first:
        print(partition_of(recipe, *sizes, ratio).table(recipe.batch.per_rank(layout.data_ranks)), flush=True)
    engine = start_engine(recipe, layout, sizes, ranks, profile, ratio, fresh)
    if trained is not None:
        engine.fill(trained)
    return engine
