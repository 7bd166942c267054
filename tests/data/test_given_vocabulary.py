"""`vocab.model`: data prepared with a vocabulary that there is already."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_run
from refusals import user_error

from deepnmt import config
from deepnmt.config import Recipe, load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.data.vocab import Vocabulary, train_vocabulary

SENTENCES = ["the small dog sees a red house", "a cat runs to the old tree", "two birds sing in the green garden"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a BPE vocabulary with a tag, one of each kind of folder that holds it, and a unigram one."""
    bpe = train_vocabulary(SENTENCES * 3, config.Vocab(size=45), ["<2de>"])
    (tmp_path / "bpe.spm").write_bytes(bpe)
    (tmp_path / "unigram.spm").write_bytes(train_vocabulary(SENTENCES * 3, config.Vocab(size=33, kind="unigram")))
    for place in ("data", "run/checkpoints/update-00000003", "mean/averaged"):
        (tmp_path / place).mkdir(parents=True)
        for side in ("src", "trg"):
            (tmp_path / place / f"{side}.spm").write_bytes(bpe)
    return tmp_path


def recipe_of(prepared: Path, folder: Path, name: str, *changes: str) -> Recipe:
    return load_recipe(prepared / "recipe.yaml", [f"data.folder={folder}/prepared", f"vocab.model={folder}/{name}",
                                                  "vocab.size=77", *changes])


def test_kinds_are_recognised(folder: Path) -> None:
    assert [Vocabulary.load(folder / f"{kind}.spm").kind for kind in ("bpe", "unigram")] == ["bpe", "unigram"]


@pytest.mark.parametrize("name", ["bpe.spm", "data", "run", "mean", "run/checkpoints/update-00000003"])
def test_the_data_have_the_vocabulary_that_is_named(name: str, prepared: Path, folder: Path) -> None:
    recipe = recipe_of(prepared, folder, name)
    prepare(recipe)
    data = open_prepared(recipe)
    assert [vocab.bytes for vocab in data.vocabs()] == [(folder / "bpe.spm").read_bytes()] * 2
    settings = data.manifest["settings"]
    assert settings["vocab.model"] is True and "vocab.size" not in settings
    if name == "data":
        elsewhere = shutil.copytree(folder / "data", folder / "moved")
        assert open_prepared(recipe_of(prepared, folder, "moved"))  # the same vocabulary under another path
        (elsewhere / "src.spm").write_bytes(b"")
        with user_error("has another vocabulary than .*moved, which vocab.model names"):
            open_prepared(recipe_of(prepared, folder, "moved"))
        shutil.rmtree(elsewhere)
        assert open_prepared(recipe_of(prepared, folder, "moved"))  # on a machine without it
        with user_error("that vocab.model named, but the recipe has none"):
            open_prepared(recipe_of(prepared, folder, "data", "vocab.model=null"))


def test_without_it_the_data_are_as_before(prepared: Path) -> None:
    assert "vocab.model" not in PreparedData.open(prepared / "data").manifest["settings"]
    with user_error("with a vocabulary of its own, but vocab.model is"):
        open_prepared(load_recipe(prepared / "recipe.yaml", [f"vocab.model={prepared}/data"]))


@pytest.mark.parametrize(("name", "changes", "sentence"), [
    ("none", [], "vocab.model is .*none, where there is no vocabulary; give a SentencePiece file"),
    ("text", [], "vocab.model names .*text, and the vocabulary is not a SentencePiece model; give another"),
    ("unigram.spm", [], "a unigram vocabulary, but vocab.kind is bpe; set vocab.kind=unigram"),
    ("bpe.spm", ["vocab.shared=false", "model.tied=decoder"], "a single vocabulary, but vocab.shared is false"),
    ("bpe.spm", ["vocab.tags=['<2fr>']"], "the tag '<2fr>' is not a piece of .*whose tags are <2de>; remove the tag"),
    ("two", [], "has a vocabulary for each side, but vocab.shared is true; set vocab.shared=false"),
])
def test_what_does_not_fit(name: str, changes: list[str], sentence: str, prepared: Path, folder: Path) -> None:
    (folder / "text").write_text("no vocabulary")
    (folder / "two").mkdir()
    shutil.copy(folder / "bpe.spm", folder / "two" / "src.spm")
    shutil.copy(folder / "unigram.spm", folder / "two" / "trg.spm")
    with user_error(sentence):
        prepare(recipe_of(prepared, folder, name, *changes))
    assert not (folder / "prepared").exists()


def test_a_vocabulary_beside_others_is_the_one_that_the_manifest_names(prepared: Path, folder: Path) -> None:
    """In prepared data, and in a checkpoint: not one that was copied there, nor a damaged one."""
    shutil.copytree(prepared / "data", folder / "whole")
    prepare(recipe_of(prepared, folder, "whole"))
    shutil.rmtree(folder / "prepared")
    tiny_run.write(tiny_run.recipe_of(folder / "trained"), 3)
    for name, place in (("whole", folder / "whole"), ("trained", folder / "trained/checkpoints/update-00000003")):
        shutil.copy(folder / "bpe.spm", place / "trg.spm")
        with user_error(f"{place} is damaged: trg.spm has .* bytes, but .* according to manifest.json"):
            prepare(recipe_of(prepared, folder, name))
    assert not (folder / "prepared").exists()


def test_a_vocabulary_for_each_side(prepared: Path, folder: Path) -> None:
    (folder / "two").mkdir()
    shutil.copy(folder / "bpe.spm", folder / "two" / "src.spm")
    shutil.copy(folder / "unigram.spm", folder / "two" / "trg.spm")
    recipe = recipe_of(prepared, folder, "two", "vocab.shared=false", "model.tied=decoder")
    prepare(recipe)
    assert [vocab.kind for vocab in open_prepared(recipe).vocabs()] == ["bpe", "unigram"]
