"""Folders that `deepnmt export` wrote, and what must be true of one before anything in it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deepnmt import folders
from deepnmt.data.prepared import is_free
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.folders import DamagedFolder, Kind
from deepnmt.tokens import BOS, PAD, UNK

FACTS = "deepnmt.json"  # the manifest, which also says what was exported from where
CARD = "README.md"  # for people, who may change it
KIND = Kind("exported model", (), "export the run again", "free disk space, or give another folder with --output",
            FACTS)
_OPENED = (".bin", ".json", ".onnx", ".safetensors", ".spm", ".txt")  # what programs look for, each by its own names


def never_written(vocab: Vocabulary) -> list[int]:
    """The target ids that deepnmt's own search never chooses, with `translate.unknown: false`."""
    return [UNK, BOS, PAD, *vocab.tags.values()]


def require_replaceable(folder: Path) -> None:
    """Raises `UserError` if a folder to export into holds anything but an exported model, or a card that somebody has
    changed."""
    if is_free(folder):
        return
    if not (folder / FACTS).is_file():
        raise UserError(f"{folder} exists and is no exported model; give another folder with --output")
    try:
        files = folders.read_manifest(folder, KIND)["files"]
    except DamagedFolder:  # a model of before 0.3.0, or a broken one, which are to be exported again
        return
    for path in sorted(folder.iterdir()):
        if path.name not in (FACTS, *files):
            raise UserError(f"{path} would be deleted, which deepnmt export did not write; move it, or give another "
                            "folder with --output")
    card = folder / CARD
    if card.is_file() and hashlib.sha256(card.read_bytes()).hexdigest() != files.get(CARD, {}).get("sha256"):
        raise UserError(f"{card} would be written anew, but somebody has changed it; move it, or give another folder "
                        "with --output")


def read_exported(folder: Path) -> dict[str, Any]:
    """The manifest of an exported model whose every byte is the one that was written and compared then.

    Raises:
        UserError: the folder is damaged, holds a file that a program might take for one of the model's, or was written
            before 0.3.0, without hashes. Such a model costs a minute to export again, and a wrong one translates
            without a word.
    """
    manifest = folders.read_json(folder, FACTS, KIND)
    if "files" not in manifest:
        raise UserError(f"{folder} was exported by deepnmt {manifest.get('deepnmt')}, which kept no hashes of its "
                        "files, so nothing shows whether they are whole; export the run again")
    manifest = folders.read_manifest(folder, KIND)
    names = manifest["files"].keys()
    folders.check_files(folder, manifest, names - {CARD}, (), KIND)
    beside = {file.name for file in folder.iterdir() if file.suffix in _OPENED}
    stray = sorted(beside - {*names, FACTS})
    if stray:
        raise DamagedFolder(folder, f"{FACTS} does not name {stray[0]}, which is none of the model's files", KIND)
    return manifest


def require_finite(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raises `UserError` where a weight that comes from elsewhere is NaN or infinite."""
    bad = next((name for name, tensor in weights.items() if not bool(tensor.isfinite().all())), None)
    if bad:
        raise UserError(f"{folder} has weights that are no numbers, in {bad}; give a model that has not diverged")
