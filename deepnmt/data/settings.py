"""Which settings of a recipe prepared data depends on, and whether a folder was made with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deepnmt.config import Corpus, Recipe
from deepnmt.data.prepared import PreparedData
from deepnmt.data.text import input_files
from deepnmt.errors import UserError

WAY_OUT = "set data.folder to a new folder, or, if no run is to go on with this one, delete it to prepare it again"


def open_prepared(recipe: Recipe, texts: bool = True, verify: bool = False) -> PreparedData:
    """The recipe's prepared data, to train from.

    Args:
        texts: whether the texts must still be those that were prepared. A run that was begun has its data's fingerprint
            to go by, and goes on whatever became of the texts.
        verify: whether every file is read and compared with its hash, and not its size alone.

    Raises:
        UserError: it is missing or damaged, or was made with another vocabulary, other filters or segmentation, or from
            other texts.
    """
    data = PreparedData.open(recipe.data.folder)
    check_settings(recipe, data)
    if verify:
        data.verify()
    if texts:
        check_texts(recipe, data)
    return data


def check_settings(recipe: Recipe, data: PreparedData) -> None:
    """Raises `UserError` naming the first setting that differs from those a folder was prepared with."""
    then = data.manifest["settings"]
    for key, value in prepared_settings(recipe).items():
        if then.get(key) != value:
            raise UserError(f"prepared data {data.folder} was made with {key} {then.get(key)}, the recipe says "
                            f"{value}; {WAY_OUT}")


def check_texts(recipe: Recipe, data: PreparedData) -> None:
    """Raises `UserError` where the texts for training or validation are others than were prepared: their sizes in bytes
    are compared, as far as they are on this machine."""
    for name, corpus in (("train", recipe.data.train), ("valid", recipe.data.valid)):
        texts = data.manifest["inputs"].get(name)
        if texts and is_here(corpus) and [f["bytes"] for f in texts] != [f.stat().st_size for f in input_files(corpus)]:
            raise other_texts(data, name)


def is_here(corpus: Corpus) -> bool:
    """Whether a corpus is on this machine, all its files; prepared data serves without."""
    return all(Path(file).exists() for file in [*corpus.src, *corpus.trg, *corpus.tsv])


def other_texts(data: PreparedData, name: str) -> UserError:
    """The fault of data made from other texts for a split than the recipe names."""
    return UserError(f"prepared data {data.folder} was made from other texts than the recipe's data.{name} names, or "
                     "they have changed since; set data.folder to a new folder to prepare these, or put the old ones "
                     "back")


def prepared_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings that the prepared bytes depend on, by their dotted names."""
    data = recipe.data
    settings = {f"data.filters.{key}": value for key, value in data.filters.model_dump().items()}
    settings |= {f"vocab.{key}": value for key, value in recipe.vocab.model_dump().items()}
    settings["data.subword_variants"] = data.subword_variants
    if data.subword_variants:
        settings["data.subword_alpha"] = data.subword_alpha
    return settings | {f"data.{name}.columns": corpus.columns for name, corpus in corpora(recipe).items() if corpus.tsv}


def corpora(recipe: Recipe) -> dict[str, Corpus]:
    """Every text of the recipe under the name of its split. Raises `UserError` for a test's name with other characters
    than file names can hold."""
    for name in recipe.data.test:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise UserError(f"data.test.{name}: a test's name becomes part of file names; use letters, digits, '_', "
                            "'-' and '.' only")
    tests = {f"test.{name}": corpus for name, corpus in recipe.data.test.items()}
    return {"train": recipe.data.train, "valid": recipe.data.valid, **tests}
