"""Which residual systems learn at depth: many runs of one recipe on real text, one table, one picture.

Every run is one line of `runs.jsonl`; those that are there already are not done again, so a study that was stopped goes
on with the same command, and systems may be added. What a run came to, by its validation loss:

    diverged     updates that were not finite ended it, or it is worse than an even guess among the tokens
    stuck        no better than the tokens' frequencies, within 0.1 nats
    target only  better, but no better than `pre_ln` of the same depth and recipe that was shown no sources, or not
                 worse by 0.1 nats when its sources are exchanged
    learned      better than the one, and worse by more with the other
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from deepnmt.config import Init, Recipe
from deepnmt.data.encoding import end_with_parent, submit
from deepnmt.data.prepared import open_prepared
from deepnmt.doctor.variants import block_pair
from deepnmt.errors import UserError
from deepnmt.files import drop_partial_line, make_run_folder, numbered_log
from deepnmt.model.blocks import BLOCKS
from deepnmt.parallel.launch import processes
from studies.block_plots import Panel, draw_study
from studies.block_runs import INTERVAL, System, run_system, shared_settings

Record = dict[str, Any]

HYBRIDS = ("post_ln/pre_ln", "pre_ln/post_ln")  # of the Admin paper's Table 1, and the other way round
REFERENCE = "pre_ln"  # what is trained without sources
# What every line has.
_SHAPE = {"system", "settings", "parameters", "losses", "ended", "valid", "exchanged", "frequencies", "even"}
MARGIN = 0.1  # nats that tell: below the tokens' frequencies, and above the own loss with exchanged sources


@dataclass(frozen=True)
class Systems:
    """The systems of a study: blocks as words, or two with a / between them for encoder and decoder; layers of each
    stack; updates of warm-up; initialisations of both stacks, of which a system skips those that come to the same.
    Every depth and warm-up has a run without sources, too."""

    blocks: Sequence[str] = (*BLOCKS, *HYBRIDS)
    depths: Sequence[int] = (18, 36)
    warmups: Sequence[int] | None = None  # None: the recipe's
    inits: Sequence[Init] = ("auto",)

    def listed(self, recipe: Recipe) -> list[System]:
        """All of them, shallow ones first. Raises `UserError` for a block that does not exist, an impossible recipe, or
        one for several processes, with an initialisation or with an earlier end of its own."""
        for side, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
            if stack.init != "auto":
                raise UserError(f"model.{side}.init is {stack.init}, but a study sets it for every run; leave it at "
                                f"auto and say --inits {stack.init}")
        training = recipe.train.model_dump()
        for name, none in (("epochs", "null"), ("max_seconds", "null"), ("patience", 0)):
            if training[name]:
                raise UserError(f"train.{name} is {training[name]}, but every run of a study goes to its last update, "
                                f"train.updates; set train.{name}={none}")
        pairs = [block_pair(word) for word in self.blocks]
        warmups = [recipe.schedule.warmup] if self.warmups is None else self.warmups
        listed = []
        for layers in self.depths:
            for warmup in warmups:
                listed.append(System(REFERENCE, REFERENCE, layers, warmup, source=False))
                listed += dict.fromkeys(System(encoder, decoder, layers, warmup, init=init).plain()
                                        for init in self.inits for encoder, decoder in pairs)
        for system in listed:
            system.recipe(recipe)
        return listed


def study(recipe: Recipe, output: Path, wanted: Systems, count: int, max_seconds: float = math.inf) -> str:
    """Does the runs that `output` lacks and writes `runs.jsonl`, `blocks.md` and `blocks.png` there; returns the table.

    Args:
        count: processes, each on a run of its own with the recipe's threads.
        max_seconds: no run is begun after so many.

    Raises:
        UserError: no prepared data, a block that does not exist, a recipe for several processes, a folder that cannot
            be written or holds a `runs.jsonl` of something else.
    """
    systems = wanted.listed(recipe)
    settings = shared_settings(recipe, open_prepared(recipe))
    make_run_folder(output, "--output")
    file = output / "runs.jsonl"
    done = _read(file)
    left = [system for system in systems if _find(done, system, settings) is None]
    deadline = time.monotonic() + max_seconds
    drop_partial_line(file)
    with file.open("a", encoding="utf-8") as stream:
        for number, record in enumerate(_results(left, recipe, count, deadline), 1):
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            system = System(**record["system"])
            print(f"{number} of {len(left)}: {system.name} {_title(system.layers, system.warmup, False)}: "
                  f"{_text(record['valid'])} ({record['seconds']:.0f} s)", file=sys.stderr, flush=True)
    done = _read(file)
    found = [record for record in (_find(done, system, settings) for system in systems) if record is not None]
    missing = len(systems) - len(found)
    text = table(found) + (f"\n\n{missing} runs are missing; the same command goes on." if missing else "")
    (output / "blocks.md").write_text(text + "\n", encoding="utf-8")
    draw_study(panels(found), output / "blocks.png",
               f"Training loss by residual system, {recipe.train.updates:,} updates of one recipe")
    return f"{text}\n{output / 'blocks.png'}"


def _read(file: Path) -> list[Record]:
    """The lines. Older ones name no initialisation, which was auto, and tell which parameters no decay was on.

    Raises:
        UserError: the file cannot be read, or a line is not a run of a study.
    """
    records = []
    for number, record in numbered_log(file) if file.exists() else []:
        if not _is_run(record):
            raise UserError(f"{file}, line {number}, is not a run of a block study, which has "
                            f"{', '.join(sorted(_SHAPE))}; set --output to a new folder, or one of compare-blocks")
        records.append(record)
        record["system"].setdefault("init", "auto")
        if not record["settings"]["optimizer"]["weight_decay"]:
            record["settings"]["optimizer"].pop("decay_norms_and_biases", None)
    return records


def _is_run(record: Any) -> bool:
    """Whether a line is of a study. A verdict grid's, for one, has settings, but of another form."""
    if not isinstance(record, dict) or not record.keys() >= _SHAPE:
        return False
    system, settings = record["system"], record["settings"]
    if not isinstance(system, dict) or not isinstance(settings, dict):
        return False
    optimizer = settings.get("optimizer")
    return isinstance(optimizer, dict) and "weight_decay" in optimizer


def _find(records: Iterable[Record], system: System, settings: dict[str, Any]) -> Record | None:
    """The run of this system with these settings, if it was done."""
    return next((record for record in records
                 if record["system"] == asdict(system) and record["settings"] == settings), None)


def _results(systems: Sequence[System], recipe: Recipe, count: int, deadline: float) -> Iterator[Record]:
    """The systems' records as they come, from so many processes at a time; none is begun after the deadline."""
    begun = iter(systems)
    if count == 1:
        for system in begun:
            if time.monotonic() > deadline:
                return
            yield _run(system, recipe)
        return
    others = set(active_children())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        running: set[Future[Record]] = set()
        try:
            while True:
                if time.monotonic() <= deadline:
                    running |= {submit(pool, _run, system, recipe) for system in islice(begun, count - len(running))}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BaseException:  # Ctrl-C too: runs take hours, and none is waited for
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _run(system: System, recipe: Recipe) -> Record:
    with processes(recipe.parallel.threads or 1) as ranks:
        return run_system(system, recipe, ranks)


# -- what came of it ---------------------------------------------------------------------------------------------------


def outcome(record: Record, target_only: float | None) -> str:
    """What a run came to, see above; `target_only`: the loss of the run without sources, None where it is missing."""
    loss = record["valid"]
    if not record["ended"] or loss is None or loss > record["even"]:
        return "diverged"
    if loss > record["frequencies"] - MARGIN:
        return "stuck"
    if target_only is None or not record["system"]["source"]:
        return "not stuck"
    reads = record["exchanged"] is not None and record["exchanged"] - loss > MARGIN
    return "learned" if loss < target_only and reads else "target only"


def _groups(records: Sequence[Record]) -> dict[tuple[int, int], dict[str, Record]]:
    """Runs by layers and warm-up, then by name."""
    groups: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        system = System(**record["system"])
        groups.setdefault((system.layers, system.warmup), {})[system.name] = record
    return groups


def _target_only(group: dict[str, Record]) -> float | None:
    """The loss of the group's run without sources."""
    found: list[float | None] = [record["valid"] for record in group.values() if not record["system"]["source"]]
    return found[0] if found else None


def table(records: Sequence[Record]) -> str:
    """A Markdown table with a row for each system and four columns for each depth and warm-up, best first group first,
    and what the words mean."""
    groups = _groups(records)
    several = len({warmup for _, warmup in groups}) > 1
    systems = {name: System(**record["system"]) for group in groups.values() for name, record in group.items()}

    def place(name: str) -> list[float]:
        losses = [group[name]["valid"] if name in group else None for group in groups.values()]
        return [math.inf if loss is None else loss for loss in losses]

    head = ["system", "initialisation"]
    for layers, warmup in groups:
        head += [f"{_title(layers, warmup, several)}: parameters", "validation", "sources exchanged", "came to"]
    rows = [head, ["---"] * len(head)]
    for name in sorted(systems, key=place):
        row = [systems[name].word, systems[name].initialisation]
        for group in groups.values():
            row += _cells(group[name], _target_only(group)) if name in group else ["", "", "", ""]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + _legend(groups)


def _cells(record: Record, target_only: float | None) -> list[str]:
    valid, exchanged = record["valid"], record["exchanged"]
    cost = "–" if valid is None or exchanged is None else f"{exchanged - valid:+.2f}"
    return [f"{record['parameters']:,}", _text(valid), cost, outcome(record, target_only)]


def _text(loss: float | None) -> str:
    if loss is None:
        return "not finite"
    return f"{loss:.3f}" if loss < 100 else f"{loss:.3g}"


def _legend(groups: dict[tuple[int, int], dict[str, Record]]) -> str:
    """The marks, and what the words of the last column mean."""
    records = [record for group in groups.values() for record in group.values()]
    if not records:
        return "No run was done yet."
    frequencies, even = records[0]["frequencies"], records[0]["even"]
    return (f"Plain loss of the validation text after {records[0]['settings']['train']['updates']:,} updates, nats a "
            f"target token; sources exchanged: what it rises by with another sentence's source. An even guess has "
            f"{even:.3f}, the tokens' frequencies {frequencies:.3f}. diverged: not finite, or worse than an even "
            f"guess; stuck: above {frequencies - MARGIN:.3f}; target only: not below {REFERENCE} without sources, or "
            f"not more than {MARGIN} higher with sources exchanged; learned: both.")


def _title(layers: int, warmup: int, several: bool) -> str:
    """A group's name; the warm-up is told where there are several."""
    text = f"{layers}L-{layers}L"
    if several:
        text += f", warm-up {warmup}" if warmup else ", no warm-up"
    return text


def panels(records: Sequence[Record]) -> list[Panel]:
    """The curves of each depth, warm-up and initialisation asked for."""
    groups = _groups(records)
    several = len({warmup for _, warmup in groups}) > 1
    made = []
    for (layers, warmup), group in groups.items():
        by_init: dict[str, dict[str, Record]] = {}
        for record in group.values():
            system = System(**record["system"])
            by_init.setdefault(system.init, {})[system.word] = record
        for init, found in by_init.items():
            first = next(iter(found.values()))
            curves = {word: [(INTERVAL * (place + 1), value) for place, value in enumerate(record["losses"])
                             if value is not None] for word, record in found.items()}
            words = {word: outcome(record, _target_only(group)) for word, record in found.items()}
            title = _title(layers, warmup, several) + ("" if init == "auto" else f", init: {init}")
            made.append(Panel(title, curves, words,
                              {"even guess": first["even"], "frequencies": first["frequencies"]}))
    return made
