"""The runs of a block study, and the file that holds them.

Every run is one line of JSON: its `system`, the settings in which runs of a study differ; `settings`, which all of them
share; and what it came to (see `blocks.run_variant`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepnmt.config import Fact, Recipe, check_recipe, flatten
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.model.blocks import BLOCKS
from deepnmt.training.trainer import STOP_CONDITIONS
from studies.runs import Record, Stacks, block_pair, read_runs

HYBRIDS = ("post_ln/pre_ln", "pre_ln/post_ln")  # the first is in the Admin paper's Table 1
REFERENCE = "pre_ln"  # the block that is trained without sources


@dataclass(frozen=True)
class Variant(Stacks):
    """The settings in which runs of a study differ: the blocks, the layers of each stack, the updates of warm-up and of
    the whole run, the peak learning rate and the seed; `source`: whether the model sees the sources, or an empty one
    for each sentence; `init`: of both stacks."""

    warmup: int
    updates: int
    rate: float
    seed: int
    source: bool = True
    init: str = "auto"

    @property
    def word(self) -> str:
        """The blocks, and whether the model sees the sources."""
        return self.blocks if self.source else f"{self.blocks}, no source"

    @property
    def name(self) -> str:
        """The word, and the initialisation if it is not auto."""
        return self.word if self.init == "auto" else f"{self.word}, {self.init}"

    @property
    def text(self) -> str:
        """The run in words."""
        return (f"{self.name} {self.layers}L-{self.layers}L, rate {self.rate:g}, seed {self.seed}, "
                f"{self.updates} updates")

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        blocks = self.name.replace("/", "_").replace(", ", "-").replace(" ", "_")
        return (f"{blocks}-{self.layers}l-warmup_{self.warmup}-updates_{self.updates}-rate_{self.rate:g}-"
                f"seed_{self.seed}")

    @property
    def initialisation(self) -> str:
        """The meaning of `init` for these blocks: `xavier`, `depth_scaled`, or two joined by a slash."""
        return "/".join(dict.fromkeys(self.initialisations(self.init)))

    def canonical(self) -> Variant:
        """The same run with init: auto, if that means the same for these blocks; otherwise this one."""
        auto = replace(self, init="auto")
        return auto if auto.initialisation == self.initialisation else self

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this variant's blocks, initialisation, depth and warm-up.

        Raises:
            UserError: the settings do not fit together, the recipe is for several processes, or says how its text is
                read.
        """
        _check_text(recipe)
        if recipe.parallel.ds_config is not None:
            raise UserError(f"parallel.ds_config is {recipe.parallel.ds_config}, but each run of a study trains "
                            "on one process without DeepSpeed; set parallel.ds_config=null")
        tree = recipe.model_dump()
        for side in ("encoder", "decoder"):
            tree["model"][side] |= {"block": getattr(self, side), "layers": self.layers, "init": self.init}
        tree["schedule"]["warmup"] = self.warmup
        tree["train"]["updates"], tree["optimizer"]["lr"], tree["seed"] = self.updates, self.rate, self.seed
        return check_recipe(tree, f"the recipe with {self.text}, schedule.warmup {self.warmup}")


def _check_text(recipe: Recipe) -> None:
    """Raises `UserError` if training would read the text otherwise than as it is prepared, all of it in every epoch."""
    text = recipe.data.train
    settings = {"batch.update_tokens": recipe.batch.update_tokens, "data.stages": recipe.data.stages,
                "data.train.temperature": text.temperature}
    for name, value in flatten({"data": {"modify": recipe.data.modify.model_dump()}}).items():
        settings[name] = value
    for setting, value in settings.items():
        default = Recipe.default(setting)
        if value != default:
            shown = "set" if setting == "data.stages" else value
            raise UserError(f"{setting} is {shown}, but each run of a study reads the whole text as it is prepared, in "
                            f"micro-batches of batch.tokens; set {setting}={json.dumps(default)}")
    for name, corpus in text.corpora.items():
        if corpus.weight != 1.0:
            raise UserError(f"data.train.{name}.weight is {corpus.weight:g}, but each run of a study reads the whole "
                            "text; set it to 1")


def list_variants(
    recipe: Recipe, blocks: Sequence[str] | None = None, depths: Sequence[int] = (18, 36),
    warmups: Sequence[int] | None = None, inits: Sequence[str] = ("auto",),
) -> list[Variant]:
    """The variants of a study, shallow ones first; every depth and warm-up also has a run without sources.

    Args:
        blocks: blocks, or encoder/decoder pairs such as `post_ln/pre_ln` (None: all blocks and `HYBRIDS`).
        depths: layers of each stack.
        warmups: updates of warm-up (None: the recipe's).
        inits: initialisations of both stacks; those with the same meaning for a variant are listed once.

    Raises:
        UserError: an unknown block, an impossible recipe, or one that uses several processes, sets the initialisation
            or ends before `train.updates`.
    """
    for side, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
        if stack.init != "auto":
            raise UserError(f"model.{side}.init is {stack.init}, but the study sets it for every run; set it to "
                            f"auto and use --inits {stack.init}")
    for name in STOP_CONDITIONS.keys() - {"updates"}:
        never = type(recipe.train).model_fields[name].default
        if (value := getattr(recipe.train, name)) != never:
            raise UserError(f"train.{name} is {value}, but every run of a study trains for all "
                            f"train.updates; set train.{name}={'null' if never is None else never}")
    pairs = [block_pair(word) for word in blocks or (*BLOCKS, *HYBRIDS)]
    listed = []
    for layers in depths:
        for warmup in warmups or [recipe.schedule.warmup]:
            shared = layers, warmup, recipe.train.updates, recipe.optimizer.lr, recipe.seed
            listed.append(Variant(REFERENCE, REFERENCE, *shared, source=False))
            listed += dict.fromkeys(Variant(encoder, decoder, *shared, init=init).canonical()
                                    for init in inits for encoder, decoder in pairs)
    for variant in listed:
        variant.recipe(recipe)
    return listed


def read_study(file: Path) -> list[Record]:
    """The runs of a study's file, see `read_runs`."""

    def update(run: Record) -> None:
        """Older lines have no initialisation (it was auto), count what is now of the system among the settings, and
        list decay settings even without decay."""
        system, settings = run["system"], run["settings"]
        system.setdefault("init", "auto")
        if "rate" not in system:  # all runs had the recipe's
            system |= {"updates": settings["train"].pop("updates"), "rate": settings["optimizer"].pop("lr"),
                       "seed": settings.pop("seed")}
        if any(BLOCKS[system[side]].profiled for side in ("encoder", "decoder")):
            settings["admin"].setdefault("method", "separate")  # the only one then
        if not run["settings"]["optimizer"]["weight_decay"]:
            run["settings"]["optimizer"].pop("decay_norms_and_biases", None)

    keys = {"system", "settings", "parameters", "losses", "ended", "valid", "exchanged", "frequencies", "even"}
    return read_runs(file, "a block study", keys, update, None, "repair it, or set --output to another folder",
                     "set --output to a new folder, or one of compare-blocks")


def shared_settings(recipe: Recipe, data: PreparedData) -> dict[str, Any]:
    """The settings that all runs of a study share, as written into each line; a run with others is another run."""
    tree = recipe.model_dump(mode="json")
    for side in ("encoder", "decoder"):
        for of_a_variant in ("block", "layers"):
            tree["model"][side].pop(of_a_variant)
    tree["schedule"].pop("warmup")
    tree["optimizer"].pop("lr")
    if not recipe.optimizer.weight_decay:
        tree["optimizer"].pop("decay_norms_and_biases")  # no effect without decay
    seen = [key.removeprefix("train.") for key in Recipe.marked(Fact.SEEN) if key.startswith("train.")]
    tree["train"] = {key: tree["train"][key] for key in ("label_smoothing", "clip", "guided_layer", *seen)}
    kept = {key: tree[key] for key in (
        "batch", "model", "admin", "optimizer", "schedule", "train", "translate", "plugins")}
    return {**kept, "data": data.fingerprint}


def same_settings(older: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a line's settings are these; what the line does not know had its default, or (a whole section) no
    effect."""
    before, now = flatten(older), flatten({name: settings[name] for name in older})
    for key in before.keys() | now.keys():
        default = Recipe.default(key)
        if before.get(key, default) != now.get(key, default):
            return False
    return True
