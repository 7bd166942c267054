"""One run of the study of residual systems: a recipe trained on prepared data, and what it learned of it.

What a model learned is read off its validation loss. Beside it stand three marks, in nats a target token: that of an
even guess, log V; that of a model which knows how often each token is and nothing else; and that of a model of the same
recipe which never saw a source. Whether it uses its sources is asked of the model itself: the validation is done again
with every sentence beside the source of another one of like length, and the loss must rise.

`B` sentences, `S` source length, `V` target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.config import Init, Recipe, check_recipe
from deepnmt.data.batching import Stream, collate, plan_eval
from deepnmt.data.prepared import PreparedData, Split, open_prepared
from deepnmt.doctor.variants import initialisation
from deepnmt.errors import UserError
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout
from deepnmt.ranks import Ranks
from deepnmt.tokens import EOS, PAD
from deepnmt.train.profile import profile_for
from deepnmt.train.state import TrainState
from deepnmt.train.updates import updates

Sources = Literal["own", "exchanged", "none"]

INTERVAL = 10  # updates whose mean loss is one point of a curve
_CHUNK = 1000  # sentences read at once


@dataclass(frozen=True)
class System:
    """What runs of a study differ in: the blocks, the layers of each stack, the updates of warm-up; `source`: whether
    sources are shown, or one that is empty in place of each; `init`: of both stacks, as in a recipe."""

    encoder: str
    decoder: str
    layers: int
    warmup: int
    source: bool = True
    init: Init = "auto"

    @property
    def word(self) -> str:
        """The blocks as one word: `admin`, or `post_ln/pre_ln` for two; and whether sources are shown."""
        word = self.encoder if self.encoder == self.decoder else f"{self.encoder}/{self.decoder}"
        return word if self.source else f"{word}, no source"

    @property
    def name(self) -> str:
        """The word, and the initialisation where it is not auto."""
        return self.word if self.init == "auto" else f"{self.word}, {self.init}"

    @property
    def initialisation(self) -> str:
        """What `init` comes to with these blocks: `xavier`, `depth_scaled`, or two with a / between them."""
        sides = [initialisation(block, self.init) for block in (self.encoder, self.decoder)]
        return sides[0] if sides[0] == sides[1] else "/".join(sides)

    def plain(self) -> System:
        """The same run with init: auto, where that is what it comes to; else this one."""
        auto = replace(self, init="auto")
        return auto if auto.initialisation == self.initialisation else self

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this system's blocks, initialisation, depth and warm-up.

        Raises:
            UserError: they do not go with it, or it is for several processes.
        """
        if recipe.parallel.ds_config is not None:
            raise UserError(f"parallel.ds_config is {recipe.parallel.ds_config}, but runs of a study are trained by "
                            "the plain engine, each on one process; set parallel.ds_config=null")
        tree = recipe.model_dump()
        for side, block in (("encoder", self.encoder), ("decoder", self.decoder)):
            tree["model"][side] |= {"block": block, "layers": self.layers, "init": self.init}
        tree["schedule"]["warmup"] = self.warmup
        return check_recipe(tree, f"the recipe with {self.name}, {self.layers} layers, schedule.warmup {self.warmup}")


def shared_settings(recipe: Recipe, data: PreparedData) -> dict[str, Any]:
    """What all runs of a study share, as it stands in each of their lines; runs of other settings are other runs."""
    tree = recipe.model_dump()
    for side in ("encoder", "decoder"):
        tree["model"][side] = {key: value for key, value in tree["model"][side].items() if key == "init"}
    tree["schedule"].pop("warmup")
    if not recipe.optimizer.weight_decay:
        tree["optimizer"].pop("decay_norms_and_biases")  # of nothing
    training = {key: tree["train"][key] for key in ("updates", "label_smoothing", "clip")}
    kept = {key: tree[key] for key in ("seed", "batch", "model", "admin", "optimizer", "schedule")}
    return {**kept, "train": training, "data": data.fingerprint}


def run_system(system: System, recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Trains one system from scratch to the recipe's last update and validates it; the run's line.

    Of the line: `losses` are means of ten updates (see `curve`), `valid` the validation loss, `exchanged` that with
    exchanged sources, `frequencies` and `even` the marks, all plain, in nats a target token; `ended`: whether it came
    to its last update; `dropped`: updates whose gradient was not finite.

    Raises:
        UserError: no prepared data, a validation text of one sentence, or a recipe for several processes.
    """
    made = system.recipe(recipe)
    data = open_prepared(made)
    valid = data.split("valid").truncated(made.model.max_length)
    if len(valid) < 2:
        raise UserError(f"the validation text has {len(valid)} sentence(s), but sources are exchanged between two; "
                        "give a longer one with data.valid")
    source, target = data.vocabs()
    started = time.monotonic()
    engine = start_engine(made, Layout(), (source.size, target.size), ranks, profile_for(made, data, ranks))
    losses, dropped = _train(engine, made, data, ranks, system.source)
    whole = len(losses) == made.train.updates + dropped
    tokens = made.batch.tokens
    record = {
        "system": asdict(system), "settings": shared_settings(recipe, data), "parameters": engine.parameters,
        "losses": curve(losses), "dropped": dropped, "ended": whole,
        "valid": _number(validation_loss(engine, valid, tokens, ranks, "own" if system.source else "none")),
        "exchanged": _number(validation_loss(engine, valid, tokens, ranks, "exchanged")) if system.source else None,
        "frequencies": frequencies_loss(data.split("train"), valid, target.size), "even": math.log(target.size),
        "seconds": round(time.monotonic() - started, 1),
    }
    engine.close()
    return record


def _train(
    engine: Engine, recipe: Recipe, data: PreparedData, ranks: Ranks, source: bool
) -> tuple[list[float], int]:
    """The updates as the training job makes them; the plain loss of each attempt, and how many were dropped.

    Ends early where so many updates in a row are dropped as end a training (`divergence.LIMIT`).
    """
    stream = (Stream if source else Sourceless)(data.split("train"), recipe.batch.tokens, recipe.seed)
    state, losses = TrainState(), []
    for done in updates(engine, stream, recipe, state, ranks):
        losses.append(done.nll / done.update.tokens)
        if done.hopeless or state.update == recipe.train.updates:
            break
    return losses, state.skipped


class Sourceless(Stream):
    """The same targets without their sources."""

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        return without_source(super().batch(epoch, index, device))


def curve(losses: Sequence[float]) -> list[float | None]:
    """Means of ten updates each, None where one is not finite. The last one may be of fewer."""
    return [_number(fmean(losses[start : start + INTERVAL])) for start in range(0, len(losses), INTERVAL)]


def _number(value: float) -> float | None:
    """Four digits, or None for what JSON has no word for."""
    return round(value, 4) if math.isfinite(value) else None


# -- validation and the marks ------------------------------------------------------------------------------------------


def validation_loss(engine: Engine, split: Split, tokens: int, ranks: Ranks, sources: Sources) -> float:
    """The plain loss of a whole text, nats a target token.

    Args:
        tokens: of a batch.
        sources: "own"; "exchanged": each sentence has that of the one before it in order of length, the first that of
            the last; "none": empty ones.
    """
    plan = plan_eval(split.src_lengths, split.trg_lengths, tokens)
    before = np.roll(plan.order, 1)
    batches = []
    for place in range(len(plan)):
        batch = collate(split, plan[place], 0, ranks.device)
        if sources == "exchanged":
            other = collate(split, before[plan.starts[place] : plan.starts[place + 1]], 0, ranks.device)
            batch = replace(batch, tensors=(*other.tensors[:2], *batch.tensors[2:]))
        elif sources == "none":
            batch = without_source(batch)
        batches.append(batch)
    sums = engine.evaluate(batches)
    return sum(nll for _, nll in sums) / sum(batch.tokens for batch in batches)


def without_source(batch: Batch) -> Batch:
    """The same targets, beside sources of nothing but the end of the sentence, [B, 1]."""
    src, lengths, *target = batch.tensors
    return replace(batch, tensors=(src.new_full((len(src), 1), EOS), torch.ones_like(lengths), *target))


def frequencies_loss(train: Split, valid: Split, vocab: int) -> float:
    """Nats a target token of the validation text by the tokens' frequencies in the training text, each counted once
    more so that none is 0."""
    counts = 1.0 + _counts(train, vocab)
    found = _counts(valid, vocab)
    return float(-(found * np.log(counts / counts.sum())).sum() / found.sum())


def _counts(split: Split, vocab: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How often each token is a target, eos included, [V]."""
    counts = np.zeros(vocab)
    for start in range(0, len(split), _CHUNK):
        ids, _ = split.targets.with_eos(np.arange(start, min(start + _CHUNK, len(split))))
        counts += np.bincount(ids[ids != PAD], minlength=vocab)
    return counts
