"""The shipped recipes load and have comments; the demo's contains every setting; deep models train."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from tiny_engines import batch_of, recipe_with

from deepnmt.batch import Batch
from deepnmt.cli import main
from deepnmt.config import Corpus, Recipe, load_recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.config.load import recipe_class
from deepnmt.model.admin_profile import measure
from deepnmt.model.init import new_model
from deepnmt.parallel.engine import LocalEngine

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "recipes" / "demo" / "admin_18l-18l.yaml"
RECIPES = sorted(file for file in (ROOT / "recipes").rglob("*.yaml")  # those of other tasks: tests/tasks
                 if "\ntask: " not in file.read_text(encoding="utf-8"))
DEPTHS = [(60, 12), (50, 50), (100, 100)]
NO_FIRST_GRADIENT = ("rezero", "rezero_post_ln", "fixup")  # no gradient reaches their encoder before the second update
VOCAB = 40

every_recipe = pytest.mark.parametrize("file", RECIPES, ids=lambda file: str(file.relative_to(ROOT / "recipes")))


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every environment variable that a recipe names, set to an empty folder."""
    for file in RECIPES:
        for name in re.findall(r"\$\{(\w+)\}", file.read_text(encoding="utf-8")):
            monkeypatch.setenv(name, str(tmp_path))


@every_recipe
def test_recipe_is_read_and_built(file: Path) -> None:
    recipe = load_recipe(file, ["model.width=8", "model.heads=2", "model.ffn=8", "model.band_factor=2"])
    model = new_model(recipe.model, VOCAB, VOCAB, recipe.seed)
    assert len(model.encoder.layers) == load_recipe(file).model.encoder.layers
    assert len(model.decoder.layers) == load_recipe(file).model.decoder.layers
    depth = file.stem.split("_")[-1]  # file names end with the depth, as in ..._60l-12l.yaml
    assert depth == recipe.model.depths.lower()


@pytest.mark.parametrize("file", [DEMO, *RECIPES], ids=lambda file: str(file.relative_to(ROOT / "recipes")))
def test_a_comment_that_lists_names_lists_all(file: Path) -> None:
    """Three names of a setting, without "..." behind them, are a list, of all or of all others."""
    lines = [(line, set(re.findall(r"\w+", line)))
             for line in file.read_text(encoding="utf-8").splitlines() if "..." not in line]
    for key, names in Recipe.named().items():
        for line, words in lines:
            if line.strip().startswith(f"{key.rpartition('.')[2]}: ") and len(words & set(names)) >= 3:
                assert set(names) <= words, line


@every_recipe
def test_recipe_passes_the_dry_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", [str(file), "--dry-run", f"data.folder={tmp_path}/none"]) == 0
    output = capsys.readouterr().out
    figures = dict(re.findall(r"^# (.+?)  +(.+)$", output, flags=re.MULTILINE))
    assert int(figures["parameters"].replace(",", "")) > 100_000
    assert figures["updates per epoch"] == "not prepared yet" and "MiB" in figures["memory per process"]
    tree = yaml.safe_load(output.partition("\n#")[0])
    assert recipe_class(tree).model_validate(tree).run == load_recipe(file).run


@every_recipe
def test_recipe_begins_with_a_comment_that_names_its_variables(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.match(r"# .*\.\n", text)  # a whole sentence, which `deepnmt recipes` shows
    for name in set(re.findall(r"\$\{(\w+)\}", text)):
        assert f"export {name}=" in text.partition("\nrun:")[0]


@every_recipe
def test_every_line_has_a_comment(file: Path) -> None:
    body = f"run:{file.read_text(encoding='utf-8').partition(chr(10) + 'run:')[2]}"
    assert [line for line in body.splitlines() if line.strip() and "# " not in line] == []


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the default of every setting; a corpus and the named tests count as one setting each."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Corpus):
            yield from settings(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.default


def test_demo_recipe_shows_every_setting() -> None:
    text = DEMO.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    missing = []
    for name, default in settings(Recipe):
        *groups, key = name.split(".")
        if key not in reduce(dict.__getitem__, groups, tree):
            missing.append(f"{key}: {json.dumps(default, default=str)}  # what it does; under {'.'.join(groups)}:")
    assert not missing, f"{DEMO} explains every setting; add these lines there: {missing}"
    for key in Corpus.model_fields:
        assert re.search(rf"\b{key}:", text), key


# -- depth -------------------------------------------------------------------------------------------------------------


def micro_batch(vocab: int = VOCAB, sentences: int = 2, length: int = 6) -> Batch:
    """Pairs of random words."""
    generator = torch.Generator().manual_seed(3)
    src, trg = (torch.randint(4, vocab, (sentences, length), generator=generator) for _ in range(2))
    trg_in = torch.cat([torch.full((sentences, 1), 1), trg[:, :-1]], dim=1)
    return batch_of(src, torch.full((sentences,), length), trg_in, trg)


def one_update(block: str, encoder: int, decoder: int, width: int) -> None:
    """One update of a model of this shape on a few words, on the local engine."""
    shape = {"width": width, "heads": max(2, width // 64), "ffn": 4 * width,
             "encoder": {"block": block, "layers": encoder}, "decoder": {"block": block, "layers": decoder}}
    update_once(recipe_with(model=shape, train={"updates": 1, "clip": 1.0}), VOCAB, micro_batch())


def update_once(recipe: Recipe, vocab: int, batch: Batch) -> None:
    """Builds the model as a run does, profiling Admin, and makes an update on the local engine."""
    model, tokens = recipe.model, batch.tokens
    omega = measure(model, vocab, vocab, recipe.seed, [batch]).omega if model.encoder.block == "admin" else None
    module = new_model(model, vocab, vocab, recipe.seed, recipe.train.label_smoothing, omega)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters() if ".0." in name}
    engine = LocalEngine(module, recipe, torch.device("cpu"))
    for _ in range(2 if model.decoder.block in NO_FIRST_GRADIENT else 1):
        stats = engine.train_step([batch], tokens, 1e-5)  # at 1e-3 one update throws fixup 50L-50L off at width 512
        assert stats.applied and math.isfinite(stats.loss) and 0 < stats.grad_norm < math.inf
    if model.encoder.block != "b2t_no_ln":  # which grows with depth at this width: docs/reference/blocks.md
        assert 0.5 < stats.nll / tokens / math.log(vocab) < 10  # in nats a token, of the order of guessing
    changed = [name for name, parameter in module.named_parameters()
               if name in before and not torch.equal(parameter, before[name])]
    assert any(name.startswith("encoder.layers.0.") for name in changed)  # the gradient reaches the lowest layers
    assert any(name.startswith("decoder.layers.0.") for name in changed)


# These five blocks at the first and the last depth, the others only at the first; each case takes seconds.
FIVE = ("post_ln", "pre_ln", "admin", "b2t", "deepnorm")
DEEP = [(block, *depth) for block in BLOCKS for depth in (DEPTHS[::2] if block in FIVE else DEPTHS[:1])]


@pytest.mark.parametrize(("block", "encoder", "decoder"), DEEP)
def test_deep_shapes_take_an_update(block: str, encoder: int, decoder: int) -> None:
    one_update(block, encoder, decoder, width=16)


@pytest.mark.skipif(os.environ.get("DEEPNMT_DEEP") != "1", reason="minutes and up to 16 GB; DEEPNMT_DEEP=1 runs it")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("encoder", "decoder"), DEPTHS)
@pytest.mark.parametrize("block", list(BLOCKS))
def test_deep_shapes_take_an_update_at_full_width(block: str, encoder: int, decoder: int) -> None:
    one_update(block, encoder, decoder, width=512)


@pytest.mark.skipif(os.environ.get("DEEPNMT_DEEP") != "1", reason="minutes and 16 GB; DEEPNMT_DEEP=1 runs it")
@pytest.mark.timeout(1800)
def test_the_deepest_recipe_takes_an_update() -> None:
    """recipes/wmt14_en_de/100l-100l.yaml as it is: every shape, its vocabulary and its optimizer; in fp32, on a CPU."""
    recipe = load_recipe(ROOT / "recipes" / "wmt14_en_de" / "100l-100l.yaml", ["parallel.ds_config=null"])
    update_once(recipe, recipe.vocab.size, micro_batch(recipe.vocab.size, sentences=8, length=16))
