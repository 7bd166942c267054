"""A run small enough for unit tests: a real vocabulary, a real recipe, and checkpoints of a real model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from deepnmt import config
from deepnmt.checkpoint.checkpoint import Contents, TrainingState
from deepnmt.checkpoint.saving import Saver
from deepnmt.checkpoint.tensors import Part
from deepnmt.data.vocab import train_vocabulary
from deepnmt.model.init import new_model
from deepnmt.processes.ranks import Ranks

SENTENCES = ["the small dog sees a red house", "a cat runs to the old tree", "two birds sing in the green garden"]
VOCAB = train_vocabulary(SENTENCES * 3, config.Vocab(size=40, kind="bpe"))
OTHER_VOCAB = train_vocabulary(SENTENCES * 3, config.Vocab(size=41, kind="bpe"))
VOCABS = {"src.spm": VOCAB, "trg.spm": VOCAB}


def recipe_of(
    run: Path, test: dict[str, dict[str, list[str]]] | None = None, model: Mapping[str, int | str] | None = None
) -> config.Recipe:
    """A recipe with one layer on each side; `model` changes settings of the model."""
    texts = {"src": ["train.en"], "trg": ["train.de"]}
    data = {"folder": "data", "src_lang": "en", "trg_lang": "de", "train": texts, "valid": texts, "test": test or {}}
    stack = {"layers": 1, "block": "b2t"}
    settings = {"width": 8, "heads": 2, "ffn": 16, "max_length": 300, "encoder": stack, "decoder": stack}
    return config.Recipe(
        run=str(run),
        data=config.Data.model_validate(data),
        model=config.Model.model_validate({**settings, **(model or {})}),
        train=config.Train(updates=10),
    )


def weights_of(recipe: config.Recipe, seed: int = 1) -> dict[str, torch.Tensor]:
    """The initial weights of the recipe's model with a seed."""
    return dict(new_model(recipe.model, 40, 40, seed).named_parameters())


def state_of(update: int, **extra: object) -> TrainingState:
    """A state with a value in every field."""
    return TrainingState(update, 2, 17 * update, update - 1, {"scale": 0.03125, "clean": 5}, {"value": 2.5}, extra)


def save(checkpoints: Path, contents: Contents, sharded: bool = False) -> Path:
    """Saves a checkpoint as a run of one process does; returns its folder."""
    moments: Mapping[str, torch.Tensor] = contents.moments or {}
    parts = [Part(name, tuple(weight.shape), 0, weight.detach().flatten(),
                  {key.removeprefix(f"{name}."): tensor.detach().flatten() for key, tensor in moments.items()
                   if key.rpartition(".")[0] == name}) for name, weight in contents.weights.items()]
    saver = Saver(checkpoints, Ranks.alone(), parts, sharded)
    saver.save(parts, contents.state, contents.recipe_yaml, contents.files)
    saver.close()
    saver.wait()
    return checkpoints / f"update-{contents.state.update:08d}"


def forge(file: Path, **changes: object) -> None:
    """Changes a manifest and gives it the hash of its new content."""
    manifest = json.loads(file.read_text()) | changes
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(manifest))


def write(
    recipe: config.Recipe, update: int, seed: int | None = None, vocabs: Mapping[str, bytes] = VOCABS, **extra: object
) -> Path:
    """Saves a checkpoint of the run whose tensors depend only on `seed` (default: `update`)."""
    weights = weights_of(recipe, update if seed is None else seed)
    moments = {f"{name}.{kind}": weight * factor for name, weight in weights.items()
               for kind, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25))}
    return save(Path(recipe.run) / "checkpoints", Contents(
        weights, moments, state_of(update, **extra), config.dump_recipe(recipe), vocabs))
