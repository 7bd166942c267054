"""Making one file of the shards that several processes wrote."""

from __future__ import annotations

import os
from pathlib import Path

from deepnmt import folders
from deepnmt.checkpoint.checkpoint import (
    RECIPE,
    Contents,
    check_target,
    find_checkpoint,
    has_moments,
    load_state,
    moments_in,
    read_task_files,
    verify_files,
    weights_in,
    write_checkpoint,
)
from deepnmt.errors import UserError

DEFAULT = "consolidated"  # the folder in a run that is written if none is named


def consolidate(source: Path, target: Path) -> Path:
    """Writes a checkpoint in shards as one whose weights and moments are in one file each, one tensor after the other.

    Args:
        source: the checkpoint, or a run folder, of which the newest is taken.
        target: the folder to write. It may be the checkpoint itself, or the `DEFAULT` one of an earlier call, which the
            new one replaces when it is complete.

    Returns:
        The folder written.

    Raises:
        UserError: there is no checkpoint in shards, it is damaged, or `target` exists and is no checkpoint, or another
            one from which training can resume.
        FolderWriteError: it cannot be written.
    """
    source = find_checkpoint(source, "newest")
    place = Path(os.path.realpath(target))
    replaces = place.name == DEFAULT or place == Path(os.path.realpath(source))
    target = check_target(target, "the consolidated checkpoint", replaces)
    manifest = verify_files(source, None)
    if manifest["format"] != folders.SHARDED:
        raise UserError(f"{source} is in one file already; it can be used as it is")
    moments = moments_in(source) if has_moments(source) else None
    recipe = (source / RECIPE).read_text(encoding="utf-8")
    write_checkpoint(target, Contents(weights_in(source), moments, load_state(source), recipe, read_task_files(source)))
    return target
