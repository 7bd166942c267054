"""Mistakes in recipes, texts, prepared data and DeepSpeed's JSON give one sentence, exit code 2 and no traceback;
nothing is written or lost."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import Refused, Tool, contents, truncate

from deepnmt.cli import main

ROOT = Path(__file__).resolve().parents[2]


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_every_fault_of_a_recipe_at_once(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    tree = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["model"] |= {"widht": 16, "heads": 3, "dropout": 1.5}
    tree["vocab"]["size"] = "large"
    tree["data"]["valid"] = {"src": "valid.en"}
    tree["data"]["folder"] = "${DEEPNMT_NOWHERE}/data"
    tree["optimiser"] = {}
    del tree["train"]["updates"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    head, *faults = refused("train", tmp_path / "recipe.yaml").rstrip("\n").split("\n")
    assert head == f"deepnmt: {tmp_path / 'recipe.yaml'} has 8 faults:"
    for words in ("model.widht: unknown setting; did you mean model.width?",
                  "width (16) must be a multiple of heads (3)",
                  "model.dropout: is 1.5", "vocab.size: is 'large'", "data.valid: give 'src' and 'trg' files",
                  "the environment variable DEEPNMT_NOWHERE is not set", "optimiser: unknown setting; did you mean",
                  "train.updates: is missing"):
        assert sum(words in fault for fault in faults) == 1, words
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]
    head, *_ = refused("train", prepared / "recipe.yaml", "model.heads=3").split("\n")
    assert head == f"deepnmt: {prepared / 'recipe.yaml'} with the settings of the command line has a fault:"


@pytest.mark.parametrize(("override", "said"), [
    ("train.updatse=3", "train.updatse: unknown setting; did you mean train.updates?"),
    ("train.updates", "is not of the form key.key=value, for example train.updates=300"),
    ("data.folder=${DEEPNMT_NOWHERE}/x", "the environment variable DEEPNMT_NOWHERE is not set; export DEEPNMT_NOWHERE"),
    ("train.updates=0", "train.updates: is 0, must be greater than or equal to 1"),
])
def test_overrides(prepared: Path, refused: Refused, override: str, said: str) -> None:
    for command in ("prepare", "train", "translate", "evaluate", "average", "profile", "benchmark", "demo"):
        several = command == "evaluate" and "=" not in override  # it takes several runs
        expected = "is neither the folder of a run nor of the form KEY=VALUE" if several else said
        assert expected in refused(command, prepared / "recipe.yaml", override)


def test_unknown_options(prepared: Path, refused: Refused) -> None:
    found = refused("train", prepared / "recipe.yaml", "--dryrun")
    assert "unknown option --dryrun; did you mean --dry-run?" in found


# -- texts and prepared data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "spoil", "said"), [
    ("train.en", lambda en, de: (en, de + b"noch\n" * 2), "{0}/train.en has 50 lines and {0}/train.de has 52"),
    ("train.en", lambda en, de: (en, de[:-1] + b"\xdc\n"), "{0}/train.de, line 50: not valid UTF-8"),
    ("train.en", lambda en, de: (b"", b""), "the corpus has 0 lines"),
    ("train.en", lambda en, de: (b"\n" * 50, de), "data.filters leave out all 50 training pairs (empty 50)"),
    ("train.en", lambda en, de: (None, de), "there is no text file {0}/train.en"),
    ("train.en", lambda en, de: (en, de), "vocab.size is 6000, but the training text gives at most"),
    ("train.en.gz", lambda en, de: (gzip.compress(en)[:-20], de), "{0}/train.en.gz is truncated after line"),
    ("train.en.gz", lambda en, de: (gzip.compress(en)[:40] + bytes(4) + gzip.compress(en)[44:], de),
     "{0}/train.en.gz is not a valid .gz file"),
    ("train.en.gz", lambda en, de: (en, de), "{0}/train.en.gz is not a valid .gz file after line 0"),
])
def test_texts(prepared: Path, refused: Refused, tmp_path: Path, source: str,
               spoil: Callable[[bytes, bytes], tuple[bytes | None, bytes]], said: str) -> None:
    """50 pairs."""
    folder, names = tmp_path / "text", (source, "train.de")
    folder.mkdir()
    texts = [b"".join((prepared / "text" / f"train.{side}").read_bytes().splitlines(keepends=True)[:50])
             for side in ("en", "de")]
    for name, text in zip(names, spoil(*texts), strict=True):
        if text is not None:
            (folder / name).write_bytes(text)
    before = contents(folder)
    files = f"data.train={{src: {folder}/{source}, trg: {folder}/train.de}}"
    found = refused("prepare", prepared / "recipe.yaml", files, f"data.folder={tmp_path}/data", "vocab.size=6000")
    assert said.format(folder) in found
    assert contents(folder) == before and [file.name for file in tmp_path.iterdir()] == ["text"]


def test_data_of_another_recipe(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, here = prepared / "recipe.yaml", f"run={tmp_path}/run"
    before = contents(prepared / "data")
    for command in ("train", "profile", "prepare"):
        found = refused(command, recipe, here, "vocab.size=200")
        assert f"{prepared}/data was made with vocab.size 300, but the recipe has 200; set data.folder" in found
    found = refused("train", recipe, "--dry-run", "vocab.size=200")
    assert f"{prepared}/data was made with vocab.size 300, but the recipe has 200; set data.folder" in found
    assert "there is no prepared data in" in refused("train", recipe, here, f"data.folder={tmp_path}/none")
    for split, sides in (("train", ("train.en", "train.de")), ("valid", ("valid.en", "test.de"))):
        other = [tmp_path / split / side for side in sides]
        texts = f"data.{split}={{src: {other[0]}, trg: {other[1]}}}"
        assert main("train", [str(recipe), "--dry-run", texts]) == 0  # they are not here, so nothing is to compare
        other[0].parent.mkdir()
        for file in other:
            shutil.copy(prepared / "text" / file.name, file)
        if split == "train":
            with other[1].open("a") as file:
                file.write("!")
        for command, *rest in (("train", here), ("profile", here), ("train", "--dry-run"), ("prepare",)):
            found = refused(command, recipe, texts, *rest)
            assert f"{prepared}/data was made from other texts than the recipe's data.{split} names, or" in found
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for command in ("train", "prepare"):
        assert "holds no manifest.json" in refused(command, recipe, here, f"data.folder={tmp_path}/notes")
    damaged = Path(shutil.copytree(prepared / "data", tmp_path / "data"))
    truncate(damaged / "train.src.tokens")
    for word in (here, "--dry-run"):
        assert "is damaged: train.src.tokens has" in refused("train", recipe, word, f"data.folder={damaged}")
    assert contents(prepared / "data") == before and contents(tmp_path / "notes") == {"mine.txt": b"mine"}
    assert not (tmp_path / "run").exists()


# -- DeepSpeed's JSON --------------------------------------------------------------------------------------------------


def changed(**settings: Any) -> str:
    """The shipped ZeRO-1 configuration with settings changed; None takes one out."""
    tree = json.loads((ROOT / "ds_configs" / "zero1.json").read_text()) | settings
    return json.dumps({key: value for key, value in tree.items() if value is not None})


@pytest.mark.parametrize(("content", "said"), [
    (changed(gradient_clipping=3.0, gradient_accumulation_steps=4, optimizer={"type": "Adam"}),
     ["gradient_clipping is 3.0, but the recipe's train.clip makes it 1.0", "batch.accumulation makes it 1",
      "optimizer is given, but the recipe's optimizer section owns it"]),
    (changed(gradient_clipping=None, data_types=None),
     ["gradient_clipping must be written: DeepSpeed clips at 1.0", "data_types.grad_accum_dtype must be written"]),
    (changed(bf16={"enabled": True}, fp16={"enabled": True}), ["bf16 and fp16 are both enabled"]),
    (changed(bf16=True), ["bf16 is true, must be an object"]),
    (changed(fp16={"enabled": True, "initial_scale_power": "7"}), ['initial_scale_power is "7", but the recipe']),
    (changed(zero_optimization={"stage": "two"}), ['zero_optimization.stage is "two", must be 0, 1, 2 or 3']),
    (changed(zero_optimization=1), ["zero_optimization.stage must be written"]),
    (changed()[:-1], ["is not valid JSON"]),
    ("[]", ["must hold one JSON object"]),
    (None, ["there is no file", "zero3_offload.json come with deepnmt"]),
])
def test_deepspeed_configurations(prepared: Path, refused: Refused, tmp_path: Path, content: str | None,
                                  said: list[str]) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    found = refused("train", prepared / "recipe.yaml", "--dry-run", f"parallel.ds_config={file}")
    assert str(file) in found and all(words in found for words in said)


def test_deepspeed_configuration_in_training(prepared: Path, tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(changed(gradient_clipping=None))
    done = tool("train", prepared / "recipe.yaml", f"run={tmp_path}/run", f"parallel.ds_config={tmp_path}/ds.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "gradient_clipping must be written" in done.stderr and not (tmp_path / "run").exists()


def test_port_of_another_run(prepared: Path, tool: Tool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = tool("train", prepared / "recipe.yaml", f"run={tmp_path}/run",
                    "parallel.ds_config=ds_configs/zero1.json", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"port {port}, where the processes meet, cannot be opened: Address already in use" in done.stderr
