"""What the processes of a run compare before it begins: recipe, data and run folder. Machines that differ would train
to wrong numbers without a word, or wait for each other for ever."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepnmt.config import Fact, Recipe, flatten
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.processes.handshake import agree
from deepnmt.processes.ranks import Ranks

_SHOW_LATE = 5.0  # seconds after which a network file system surely shows a new file


def agree_on_recipe(recipe: Recipe, ranks: Ranks) -> None:
    """Raises `UserError` on every process, naming settings and machines, if their recipes differ. Collective."""
    settings = {}
    for key, value in flatten(recipe.model_dump()).items():
        if recipe.parallel.same_paths or not recipe.is_marked(key, Fact.PATH):
            settings[key] = str(value)
    if not recipe.parallel.same_paths:
        settings["the SHA-256 of plugins"] = ", ".join(sorted(recipe.plugins.values()))
    agree(ranks, "the recipes", settings, "start all machines with the same recipe and overrides; if only paths of "
          "files and folders differ, set parallel.same_paths=false on all")


def agree_on_contents(
    recipe: Recipe, config: dict[str, Any] | None, fingerprint: str, files: Mapping[str, bytes], ranks: Ranks
) -> None:
    """The same for what the files that a recipe names hold, whatever their paths. Collective.

    Args:
        config: the DeepSpeed JSON.
        fingerprint: of the training data.
        files: that a checkpoint takes from the data, such as vocabularies.
    """
    contents = {}
    for key, value in flatten(config or {}).items():
        contents[f"{key} in parallel.ds_config"] = str(value)
    if recipe.admin.profile is not None:
        with suppress(OSError):
            contents["the content of admin.profile"] = sha256(Path(recipe.admin.profile))[:8]
    contents["the data's fingerprint"] = fingerprint[:16]
    for name, content in files.items():
        contents[f"the vocabulary {name}"] = hashlib.sha256(content).hexdigest()[:8]
    agree(ranks, "the contents", contents, "give all machines the same files; the data are best prepared once, into a "
          "folder that all of them see")


def agree_on_folder(folder: Path, ranks: Ranks) -> None:
    """Raises `UserError` on every process, naming a machine, unless all see in `folder` what rank 0 does. Collective.

    Only rank 0 writes checkpoints, but all processes read them.
    """
    if ranks.world == 1:
        return
    name = ranks.broadcast_bytes(f".tmp-{secrets.token_hex(8)}".encode()).decode()

    def write() -> None:
        if ranks.first:
            try:
                (folder / name).write_text(name, encoding="utf-8")
            except OSError as error:
                raise UserError(f"{folder} cannot be written to: {error.strerror}; make it writable, or train into "
                                "another folder with run=FOLDER") from None

    def read() -> None:
        fault = fault_of_shared(folder, name)
        if fault:
            raise UserError(f"the run folder {folder} is {fault} on {socket.gethostname()}; every machine reads the "
                            "checkpoints in it, so set run to a folder that all of them share (its path may differ "
                            "with parallel.same_paths=false)")

    try:
        ranks.raise_everywhere(write)
        ranks.raise_everywhere(read)
    finally:
        if ranks.first:
            with suppress(OSError):
                os.unlink(folder / name)


def fault_of_shared(folder: Path, name: str) -> str:
    """What is wrong with a folder in which another process has written a file that holds its own `name`; "" if nothing
    is."""
    until = time.monotonic() + _SHOW_LATE
    while not (folder / name).exists() and time.monotonic() < until:
        time.sleep(0.1)
    try:
        same = (folder / name).read_text(encoding="utf-8") == name
    except FileNotFoundError:
        return "not the first machine's folder" if folder.is_dir() else "missing"
    except (OSError, ValueError) as error:
        return f"not readable ({getattr(error, 'strerror', error)})"
    return "" if same else "another folder"
