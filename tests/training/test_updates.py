"""What a micro-batch passes through from its arrays to the update."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import numpy as np
from tiny_engines import ROOT, VOCAB, build, recipe_of

import deepnmt
from deepnmt.data.arrays import SideWriter, Split
from deepnmt.data.batching import Stream
from deepnmt.processes.ranks import Ranks
from deepnmt.training.state import Interval, TrainState
from deepnmt.training.updates import updates

PACKAGE = Path(deepnmt.__file__).parent


def test_an_update_runs_through_the_files_that_the_architecture_page_lists(tmp_path: Path) -> None:
    """With the plain engine, from the second update on: what is done once is not on the way."""
    for side in ("src", "trg"):
        SideWriter(tmp_path, f"train.{side}").add(np.full(60, 7, np.uint16), np.full(20, 3))
    split = Split(tmp_path, [file.name for file in tmp_path.iterdir()], "train")
    recipe, ranks = recipe_of("local", max_seconds=9e9), Ranks.alone()
    loop = updates(build(recipe, ranks), Stream(split, VOCAB, 1), recipe, TrainState(), ranks)
    next(loop)
    files: set[str] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            files.add(str(file.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        next(loop)
    finally:
        sys.setprofile(before)
    page = (ROOT / "docs/reference/architecture.md").read_text(encoding="utf-8")
    _, _, paragraph = page.partition("**An update runs through")
    listed = re.findall(r"`(\w[\w/]*\.py)`", paragraph.partition("\n\n")[0])
    assert files == set(listed) and len(listed) == len(files)


def test_what_older_checkpoints_count_is_no_figure() -> None:
    assert Interval.from_saved({"loss": 2.0, "updates": 3, "alignment_loss": 1.0}) == Interval(
        loss=2.0, figures={"alignment_loss": 1.0})
