"""Checkpoints in shards: what several processes write, in one file or each its own, and what readers take from it."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_run
import torch
from refusals import user_error
from safetensors.torch import load_file, save_file
from warm import TESTS, Warm

from deepnmt.checkpoint.average import average_weights, save_average
from deepnmt.checkpoint.checkpoint import (
    Contents,
    has_moments,
    load_model,
    load_weights,
    moments_in,
    task_files,
    verify,
    verify_files,
    weights_in,
    write_checkpoint,
)
from deepnmt.checkpoint.consolidate import consolidate
from deepnmt.checkpoint.saving import Saver
from deepnmt.checkpoint.tensors import Part, index_of, tensor_file
from deepnmt.config import dump_recipe
from deepnmt.folders import DamagedFolder
from deepnmt.processes.process_group import processes

MOMENTS = {"exp_avg": 0.5, "exp_avg_sq": 0.25}


def cuts(name: str, count: int, world: int) -> list[int]:
    """Where the flattened parameter `name` is cut into the ranges of the processes, some of them empty."""
    draw = random.Random(name)
    return [0, *sorted(draw.randint(0, count) for _ in range(world - 1)), count]


def parts_of(weights: dict[str, torch.Tensor], rank: int, world: int) -> list[Part]:
    parts = []
    for name, weight in weights.items():
        start, stop = cuts(name, weight.numel(), world)[rank : rank + 2]
        if start < stop:
            flat = weight.detach().flatten()[start:stop]
            moments = {moment: flat * factor for moment, factor in MOMENTS.items()}
            parts.append(Part(name, tuple(weight.shape), start, flat, moments))
    return parts


def save(run: str) -> None:
    """Runs on each rank: two saves in each form; the second replaces the first."""
    recipe = tiny_run.recipe_of(Path(run))
    with processes(threads=1) as ranks:
        for form in ("shards", "one_file"):
            saver = Saver(Path(run, form), ranks, parts_of(tiny_run.weights_of(recipe), ranks.rank, ranks.world),
                          form == "shards")
            for seed in (5, 7):
                parts = parts_of(tiny_run.weights_of(recipe, seed), ranks.rank, ranks.world)
                saver.save(parts, tiny_run.state_of(10), dump_recipe(recipe), tiny_run.VOCABS)
                for part in parts:  # training goes on
                    part.weight.zero_()
                turns = 0.0
                while not saver.done():
                    turns += 1
                assert ranks.max([turns, -turns]) == [turns, -turns], "all processes learn of it at the same moment"
                saver.wait()
            saver.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """Of three processes: shards/update-00000010 and one_file/update-00000010, of the same tensors."""
    folder = tmp_path_factory.mktemp("shards")
    warm.run(3, "test_shards:save", folder)
    return folder


@pytest.fixture
def sharded(run: Path) -> Path:
    return run / "shards" / "update-00000010"


def expected(run: Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in tiny_run.weights_of(tiny_run.recipe_of(run), 7).items()}


def test_tensor_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {"b.ü\"\\": torch.randn(3, 5).t(), "a": torch.randn(7), "empty": torch.empty(0, 4), "one": torch.ones(())}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert b"".join(tensor_file(shapes, tensors.__getitem__)) == (tmp_path / "theirs").read_bytes()


def test_what_processes_own_must_be_everything_once() -> None:
    whole = [("w", [2, 3], 0, 4)], [("w", [2, 3], 4, 6)]
    assert index_of(whole, ["m"]) == {"moments": ["m"], "parameters": {"w": {"shape": [2, 3], "parts": [[0, 4, 0],
                                                                                                    [4, 6, 1]]}}}
    for wrong in (whole[:1], whole[1:], (*whole, whole[1]), (whole[0], [("w", [2, 3], 3, 6)])):
        with pytest.raises(ValueError, match=r"w \[2, 3\]"):
            index_of(wrong, [])


def test_shards_hold_what_each_process_owned(run: Path, sharded: Path) -> None:
    verify(sharded)
    manifest = json.loads((sharded / "manifest.json").read_text())
    assert manifest["format"] == 2 and manifest["parameters"] == sum(w.numel() for w in expected(run).values())
    for rank in range(3):
        owned = {f"{part.name}@{part.start}:{part.start + len(part.weight)}": part.weight
                 for part in parts_of(expected(run), rank, 3)}
        held = load_file(sharded / f"weights-0000{rank}.safetensors")
        assert held.keys() == owned.keys() and all(torch.equal(held[key], owned[key]) for key in owned)
        assert manifest["tensors"][f"moments-0000{rank}.safetensors"] == 2 * len(owned)
    assert task_files(sharded) == ["src.spm", "trg.spm"] and has_moments(sharded)
    assert not any(sharded.parent.glob(".*"))


def test_whole_tensors_and_ranges_are_read_from_either_form(run: Path) -> None:
    draw = random.Random(1)
    for form in ("shards", "one_file"):
        folder = run / form / "update-00000010"
        weights, moments = weights_in(folder), moments_in(folder)
        assert load_weights(folder).keys() == weights.shapes.keys() == expected(run).keys()
        for name, weight in expected(run).items():
            assert torch.equal(weights(name), weight) and torch.equal(load_weights(folder)[name], weight)
            assert torch.equal(moments(f"{name}.exp_avg_sq"), weight * 0.25)
            start, stop = sorted(draw.randint(0, weight.numel()) for _ in range(2))
            assert torch.equal(weights.part(name, start, stop), weight.flatten()[start:stop])
        with pytest.raises(DamagedFolder, match="holds no tensor nowhere"):
            weights("nowhere")


def test_a_range_is_read_alone(sharded: Path) -> None:
    weights = weights_in(sharded)
    name, count = "embeddings.shared.weight", weights.shapes["embeddings.shared.weight"][0] * 8
    first, second = cuts(name, count, 3)[:2]
    with patch("deepnmt.checkpoint.tensors.safe_open", side_effect=OSError("opened")), pytest.raises(
            DamagedFolder, match=r"weights-00000\.safetensors cannot be read \(opened\)"):
        weights.part(name, first, second)
    assert len(weights.part(name, first, second)) == second - first and list(weights._open) == [
        "weights-00000.safetensors"]


def test_models_and_averages_are_those_of_one_file(run: Path, sharded: Path, tmp_path: Path) -> None:
    other = run / "one_file" / "update-00000010"
    ours, theirs = load_model(sharded), load_model(other)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    mean, same = average_weights([sharded, other]), expected(run)
    assert all(torch.equal(mean[name], same[name]) for name in same)
    save_average([sharded, other], tmp_path / "averaged")
    assert sorted(path.name for path in (tmp_path / "averaged").glob("*.safetensors")) == ["weights.safetensors"]


def test_consolidated_shards_are_the_files_of_one_process(run: Path, sharded: Path, tmp_path: Path) -> None:
    assert consolidate(sharded, tmp_path / "consolidated") == consolidate(sharded, tmp_path / "consolidated")
    folder = consolidate(sharded, tmp_path / "whole")
    one = run / "one_file" / "update-00000010"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in one.iterdir()}
    here = shutil.copytree(sharded, tmp_path / "update-00000010")
    assert consolidate(here, here) == here
    verify(here)
    assert (here / "moments.safetensors").read_bytes() == (one / "moments.safetensors").read_bytes()
    assert not list(here.glob("*-0*")) and not list(tmp_path.glob(".*"))
    with user_error("is in one file already"):
        consolidate(here, here)
    (tmp_path / "other").mkdir()
    with user_error("exists and is not a checkpoint"):
        consolidate(sharded, tmp_path / "other")
    other = shutil.copytree(sharded, tmp_path / "update-00000005")
    with user_error("is a checkpoint from which training can resume"):
        consolidate(sharded, other)
    (tmp_path / "consolidated").rename(tmp_path / "before")
    (tmp_path / "consolidated").symlink_to(other)
    with user_error("update-00000005 is a checkpoint from which training can resume"):
        consolidate(sharded, tmp_path / "consolidated")


@pytest.mark.parametrize("name", ["index.json", "weights-00001.safetensors", "moments-00002.safetensors"])
def test_damage_is_found_and_named(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(sharded, tmp_path / "update-00000010")
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(DamagedFolder, match=f"the SHA-256 of {name} differs"):
        verify(folder)
    if name.startswith("moments"):
        verify_files(folder, ["weights.safetensors"])
    else:
        with pytest.raises(DamagedFolder, match=f"the SHA-256 of {name} differs"):
            load_model(folder)
    (folder / name).unlink()
    with pytest.raises(DamagedFolder, match=f"{name} is missing"):
        verify(folder)


def test_files_that_no_manifest_names_are_not_read(run: Path, sharded: Path, tmp_path: Path) -> None:
    """As after a run was copied over one in the other form: the files of the older one lie beside the newer one's."""
    older = Contents({name: weight + 1 for name, weight in expected(run).items()}, None, tiny_run.state_of(10),
                     dump_recipe(tiny_run.recipe_of(run)), tiny_run.VOCABS)
    for form, name in (("one_file", "shards"), ("shards", "one_file")):
        folder = shutil.copytree(run / name / "update-00000010", tmp_path / form / "update-00000010")
        for file in (run / form / "update-00000010").iterdir():
            shutil.copy(file, folder)
        for file in folder.glob("weights*"):  # as if of other weights
            if not (run / form / "update-00000010" / file.name).exists():
                file.write_bytes(b"of another model")
        if form == "one_file":
            (folder / "index.json").write_text("{}")
        verify(folder)
        assert all(torch.equal(weights_in(folder)[key], weight) for key, weight in expected(run).items())
        load_model(folder)
        save_average([folder], tmp_path / form / "averaged")
    with user_error("is in one file already"):
        consolidate(tmp_path / "one_file" / "update-00000010", tmp_path / "other")
    write_checkpoint(tmp_path / "averaged", older)
    shutil.copy(sharded / "moments-00000.safetensors", tmp_path / "averaged")
    assert not has_moments(tmp_path / "averaged")
    shutil.copy(sharded / "index.json", tmp_path / "averaged")
    assert all(torch.equal(weights_in(tmp_path / "averaged")[key], weight) for key, weight in older.weights.items())


def test_an_index_names_no_file_that_the_manifest_does_not(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "one")
    index = json.loads((folder / "index.json").read_text())
    for entry in index["parameters"].values():
        entry["parts"] = [[start, stop, rank + 4] for start, stop, rank in entry["parts"]]
    for rank in range(3):
        shutil.copy(folder / f"weights-0000{rank}.safetensors", folder / f"weights-0000{rank + 4}.safetensors")
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedFolder, match=r"manifest.json does not name weights-0000\d.safetensors"):
        dict(weights_in(folder))


def test_an_index_of_something_else_is_refused(tmp_path: Path, sharded: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "one")
    index = json.loads((folder / "index.json").read_text())
    name, entry = next(iter(index["parameters"].items()))
    entry["parts"].pop()
    for wrong, message in ((index, f"does not hold all of the tensor {name}"), ({}, "is not an index of tensors"),
                           ({"moments": 3, "parameters": []}, "is not an index of tensors"),
                           ({"moments": [], "parameters": {"w": {"shape": [2], "parts": [3]}}}, "is not an index"),
                           ({"moments": [], "parameters": {"w": {"shape": "ab", "parts": []}}}, "is not an index")):
        (folder / "index.json").write_text(json.dumps(wrong))
        with pytest.raises(DamagedFolder, match=message):
            dict(weights_in(folder))


def test_the_page_reads_shards(sharded: Path, run: Path) -> None:
    """The Python of the section of docs/reference/checkpoints.md."""
    text = (TESTS.parent / "docs" / "reference" / "checkpoints.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text.partition("### Shards")[2].partition("\n### ")[0],
                         flags=re.MULTILINE | re.DOTALL)
    page: dict[str, Any] = {"np": np, "json": json}
    exec(compile(code, "checkpoints.md", "exec"), page)
    for name, weight in expected(run).items():
        np.testing.assert_array_equal(page["read_shards"](sharded, name), weight.numpy())


def test_views_are_written_as_they_are(tmp_path: Path) -> None:
    contents = Contents({"w": torch.arange(6.0).view(2, 3).t()}, None, tiny_run.state_of(1), "", {})
    write_checkpoint(tmp_path / "one", contents)
    assert torch.equal(weights_in(tmp_path / "one")["w"], contents.weights["w"])
