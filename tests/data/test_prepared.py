"""The prepared folder: arrays are read as written, and any damage is noticed."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import user_error

from deepnmt.config import Vocab
from deepnmt.data.arrays import SideWriter, variant_stem
from deepnmt.data.prepared import PreparedData, publish
from deepnmt.data.vocab import train_vocabulary
from deepnmt.errors import UserError

SRC = [[5, 6, 7], [], [65000], [4, 4, 4, 4, 4]]
TRG = [[9], [8, 8], [], [10, 11, 12]]
SAMPLED = [[5, 6, 6, 7], [], [65000], [4]]


def _write(folder: Path, stem: str, sentences: list[list[int]]) -> None:
    writer = SideWriter(folder, stem)
    for part in (sentences[:3], sentences[3:]):
        flat = np.array([token for sentence in part for token in sentence], dtype=np.uint16)
        writer.add(flat, np.array([len(sentence) for sentence in part]))
    assert writer.end == sum(map(len, sentences))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for stem, src in (("train", SRC), (variant_stem("train", 0), SAMPLED), ("valid", SRC)):
        _write(tmp_path, f"{stem}.src", src)
        _write(tmp_path, f"{stem}.trg", TRG)
    for side in ("src", "trg"):
        (tmp_path / f"valid.{side}.txt").write_bytes("a\r b\u2028c\n\nd\ne\n".encode())
    splits = {"train": {"variants": 1}, "valid": {"variants": 0}}
    publish(tmp_path, tmp_path, {"settings": {}, "inputs": {}, "vocab": {}, "splits": splits})
    return tmp_path


def _fault(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        PreparedData.open(folder)
    return str(error.value)


def test_arrays_are_read_as_written(folder: Path) -> None:
    data = PreparedData.open(folder)
    split = data.split("train")
    assert len(split) == 4 and data.splits == ["train", "valid"]
    assert [split.sources[i].tolist() for i in range(4)] == SRC
    assert [split.targets[i].tolist() for i in range(4)] == TRG
    assert split.src_lengths.tolist() == [4, 1, 2, 6] and split.src_lengths.dtype == np.int32
    assert split.trg_lengths.tolist() == [2, 3, 1, 4]
    assert split.sources[0].dtype == np.uint16 and isinstance(split.sources[0].base, np.memmap)
    variant = split.variant(0)
    assert [variant.sources[i].tolist() for i in range(4)] == SAMPLED
    with pytest.raises(IndexError):
        split.variant(1)
    with user_error(r"has no split 'test.a'; it has train, valid"):
        data.split("test.a")


def test_rows_are_padded_after_eos(folder: Path) -> None:
    ids, lengths = PreparedData.open(folder).split("train").sources.with_eos(np.array([2, 0, 1]))
    assert ids.tolist() == [[65000, 2, 3, 3], [5, 6, 7, 2], [2, 3, 3, 3]] and lengths.tolist() == [2, 4, 1]


def test_truncation_keeps_eos_and_short_sentences(folder: Path) -> None:
    split = PreparedData.open(folder).split("valid").truncated(3)
    assert split.src_lengths.tolist() == [3, 1, 2, 3] and split.trg_lengths.tolist() == [2, 3, 1, 3]
    assert split.sources[3].tolist() == [4, 4] and split.targets[3].tolist() == [10, 11]
    assert split.sources.with_eos(np.array([0]))[0].tolist() == [[5, 6, 2]]


def test_text_keeps_its_lines(folder: Path) -> None:
    assert PreparedData.open(folder).split("valid").trg_text() == ["a\r b\u2028c", "", "d", "e"]


def test_missing_other_and_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    assert "there is no prepared data" in _fault(tmp_path / "none")
    (tmp_path / "other").mkdir()
    assert "there is no prepared data" in _fault(tmp_path / "other")
    (tmp_path / "other" / "notes").touch()
    assert "holds no manifest.json" in _fault(tmp_path / "other")
    assert "holds no manifest.json" in _fault(folder / "train.src.tokens")
    (folder / "valid.src.txt").unlink()
    assert "is damaged: valid.src.txt is missing" in _fault(folder)


@pytest.mark.parametrize(("contents", "words"), [
    ("{", "cannot be read"), ("[1]", "is not a JSON object"), ('{"format": "another"}', "is not a manifest"),
    ('{"format": "deepnmt-data", "version": 99}', "format version is 99, but this deepnmt reads 1 to 3"),
    ('{"format": "deepnmt-data", "version": 2, "files": {}}', "manifest.json has been altered"),
    ('{"format": "deepnmt-data", "version": 1, "files": {}}', "lacks settings, inputs, vocab, splits"),
])
def test_wrong_manifests(folder: Path, contents: str, words: str) -> None:
    (folder / "manifest.json").write_text(contents)
    assert words in _fault(folder)


def test_open_notices_a_truncated_file_and_verify_a_changed_byte(folder: Path) -> None:
    tokens = folder / "train.trg.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    assert f"train.trg.tokens has {len(whole) - 2} bytes, but {len(whole)} according to man" in _fault(folder)
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with user_error(r"the SHA-256 of train.trg.tokens differs"):
        PreparedData.open(folder).verify()
    tokens.write_bytes(whole)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["x"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "is damaged: manifest.json has been altered; delete the folder" in _fault(folder)
    manifest = of_version_1(json.loads((folder / "manifest.json").read_text()))  # of the oldest, which had no own hash
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert PreparedData.open(folder).manifest["settings"]["x"] == 1
    (folder / "manifest.json").write_text(json.dumps({**manifest, "rha256": ""}))  # a bit of the hash's key
    assert "rha256 has an impossible value" in _fault(folder)
    for section, name, value in (("files", "train.src.offsets", {"bytes": "9", "sha256": ""}), ("files", "src.spm", 3),
                                 ("files", "../x", {"bytes": 1, "sha256": ""}), ("splits", "train", {"variants": -1}),
                                 ("splits", "train", {}), ("inputs", "train", [[]])):
        changed = copy.deepcopy(manifest)
        changed[section][name] = value
        (folder / "manifest.json").write_text(json.dumps(changed))
        assert re.search(rf"{section}.{name}.* has an impossible value", _fault(folder))


def of_version_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest as version 0.1 wrote it."""
    files = {name: {"bytes": entry["size"], "sha256": entry["sha256"]} for name, entry in manifest["files"].items()}
    return {key: value for key, value in manifest.items() if key not in ("deepnmt", "sha256")} | {
        "version": 1, "files": files}


def test_only_files_that_the_manifest_names_are_read(folder: Path) -> None:
    """Others may be of older data over which these were copied."""
    manifest = of_version_1(json.loads((folder / "manifest.json").read_text()))
    for name in ("train.src.tokens", "valid.trg.txt"):
        del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "src.spm").write_bytes(b"stray")
    data = PreparedData.open(folder)
    for read, name in ((lambda: data.split("train"), "train.src.tokens32"), (data.vocabs, "src.spm"),
                       (lambda: data.split("valid").trg_text(), "valid.trg.txt")):
        with user_error(f"is damaged: manifest.json does not name {name}; delete the folder"):
            read()


def test_tokens_of_16_bits_beside_those_of_32_are_not_read(tmp_path: Path) -> None:
    _write(tmp_path, "train.trg", TRG)
    writer = SideWriter(tmp_path, "train.src", 1 << 17)
    writer.add(np.array([5, 6, 7, 100_000, 4, 4, 4, 4, 4]), np.array([3, 0, 1, 5]))
    publish(tmp_path, tmp_path, {"settings": {}, "inputs": {}, "vocab": {}, "splits": {"train": {"variants": 0}}})
    (tmp_path / "train.src.tokens").write_bytes(np.arange(9, dtype="<u2").tobytes())
    assert PreparedData.open(tmp_path).split("train").sources[2].tolist() == [100_000]


def test_every_flipped_bit_is_found(prepared: Path, tmp_path: Path) -> None:
    """200, as many in each file, 10,000 if DEEPNMT_LONG is set; and the vocabulary of another text."""
    folder = tmp_path / "data"
    shutil.copytree(prepared / "data", folder)
    PreparedData.open(folder).verify()
    files, draw = sorted(folder.iterdir()), random.Random(8)
    for number in range(10_000 if os.environ.get("DEEPNMT_LONG") else 200):
        file = files[number % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with user_error(rf"^(prepared data {folder}|{folder}/manifest\.json) .*(delete the folder and run deepnmt prep"
                        r"|is not a manifest of deepnmt's)"):
            PreparedData.open(folder).verify()
        file.write_bytes(whole)
    whole = (folder / "trg.spm").read_bytes()
    (folder / "trg.spm").write_bytes(train_vocabulary(["other words"] * 50, Vocab(size=14)).ljust(len(whole), b"x"))
    with user_error("the SHA-256 of trg.spm differs|trg.spm has"):
        PreparedData.open(folder).verify()


def test_data_that_contradict_themselves_are_refused(prepared: Path, tmp_path: Path) -> None:
    """Hashes that fit are no proof in data from elsewhere."""
    folder = tmp_path / "data"
    for name, content, words in (
        ("valid.trg.tokens", lambda data: b"\xff\xff" + data[2:], "has a token 65535, but the vocabulary has"),
        ("valid.src.offsets", lambda data: data[:8] + b"\xff" * 8 + data[16:], "does not divide valid.src.tokens"),
        ("valid.src.offsets", lambda data: b"", "does not divide valid.src.tokens"),
        ("valid.src.offsets", lambda data: data[:1], "valid.src.offsets cannot be read"),
        ("valid.src.offsets", lambda data: data[:8] + data[16:], "valid has 19 source sentences, but 20 target sen"),
        ("valid.src.txt", lambda data: data + b"x\n", "valid.src.txt has 21 lines for 20 sentences"),
        ("valid.src.txt", lambda data: b"\xff" + data, "valid.src.txt cannot be read"),
    ):
        shutil.copytree(prepared / "data", folder)
        (folder / name).write_bytes(content((folder / name).read_bytes()))
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").unlink()
        publish(folder, folder, {key: manifest[key] for key in ("settings", "inputs", "vocab", "splits")})
        with user_error(words):
            data = PreparedData.open(folder)
            data.verify()
            data.split("valid").src_text()
        shutil.rmtree(folder)
