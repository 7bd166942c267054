"""Which blocks learn at depth: many runs of one recipe on real text, one table, one picture.

Every run is one line of `runs.jsonl`; those that are there already are not done again, so a study that was stopped goes
on with the same command, and blocks may be added. What a model learned is read off its validation loss. Beside it
stand three marks, in nats a target token: that of an even guess, log V; that of a model which knows how often each
token is and nothing else; and that of a model of the same recipe which never saw a source. Whether it uses its sources
is asked of the model itself: the validation is done again with every sentence beside the source of another one of like
length (shuffled sources), and the loss must rise. The outcome of a run:

    diverged     updates that were not finite ended it, or it is worse than an even guess among the tokens
    stuck        no better than the tokens' frequencies, within 0.1 nats
    target only  better, but no better than `pre_ln` of the same depth and recipe that was shown no sources, or not
                 worse by 0.1 nats with shuffled sources
    learned      better than the one, and worse by more with the other

`B` sentences, `S` source length, `V` target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.config import Init, Recipe, Section, check_recipe
from deepnmt.data.batching import Stream, collate, plan_eval
from deepnmt.data.encoding import end_with_parent, submit
from deepnmt.data.prepared import PreparedData, Split, open_prepared
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, markdown_table
from deepnmt.model.blocks import BLOCKS
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.launch import processes
from deepnmt.parallel.settings import Layout
from deepnmt.progress import print_status
from deepnmt.ranks import Ranks
from deepnmt.tokens import EOS, PAD
from deepnmt.train.profile import profile_for
from deepnmt.train.state import TrainState
from deepnmt.train.trainer import STOP_CONDITIONS
from deepnmt.train.updates import updates
from studies.plots import Panel, plot_study
from studies.runs import Record, Stacks, append_runs, block_pair, read_runs

HYBRIDS = ("post_ln/pre_ln", "pre_ln/post_ln")  # of the Admin paper's Table 1, and the other way round
REFERENCE = "pre_ln"  # what is trained without sources
INTERVAL = 10  # updates whose mean loss is one point of a curve
MARGIN = 0.1  # nats that tell: below the tokens' frequencies, and above the own loss with shuffled sources
_CHUNK = 1000  # sentences read at once


@dataclass(frozen=True)
class System(Stacks):
    """What runs of a study differ in: the blocks, the layers of each stack, the updates of warm-up; `source`: whether
    sources are shown, or one that is empty in place of each; `init`: of both stacks, as in a recipe."""

    warmup: int
    source: bool = True
    init: Init = "auto"

    @property
    def word(self) -> str:
        """The blocks, and whether sources are shown."""
        return self.blocks if self.source else f"{self.blocks}, no source"

    @property
    def name(self) -> str:
        """The word, and the initialisation where it is not auto."""
        return self.word if self.init == "auto" else f"{self.word}, {self.init}"

    @property
    def initialisation(self) -> str:
        """What `init` comes to with these blocks: `xavier`, `depth_scaled`, or two with a / between them."""
        return "/".join(dict.fromkeys(self.initialisations(self.init)))

    def plain(self) -> System:
        """The same run with init: auto, where that is what it comes to; else this one."""
        auto = replace(self, init="auto")
        return auto if auto.initialisation == self.initialisation else self

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this system's blocks, initialisation, depth and warm-up.

        Raises:
            UserError: they do not go with it, or it is for several processes.
        """
        if recipe.parallel.ds_config is not None:
            raise UserError(f"parallel.ds_config is {recipe.parallel.ds_config}, but runs of a study are trained by "
                            "the plain engine, each on one process; set parallel.ds_config=null")
        tree = recipe.model_dump()
        for side in ("encoder", "decoder"):
            tree["model"][side] |= {"block": getattr(self, side), "layers": self.layers, "init": self.init}
        tree["schedule"]["warmup"] = self.warmup
        return check_recipe(tree, f"the recipe with {self.name}, {self.layers} layers, schedule.warmup {self.warmup}")


def list_systems(
    recipe: Recipe, blocks: Sequence[str] | None = None, depths: Sequence[int] = (18, 36),
    warmups: Sequence[int] | None = None, inits: Sequence[Init] = ("auto",),
) -> list[System]:
    """The systems of a study, shallow ones first; every depth and warm-up has a run without sources, too.

    Args:
        blocks: words, or two with a / between them for encoder and decoder (None: all, and `HYBRIDS`).
        depths: layers of each stack.
        warmups: updates of warm-up (None: the recipe's).
        inits: initialisations of both stacks; those that come to the same for a system are listed once.

    Raises:
        UserError: a block that does not exist, an impossible recipe, or one for several processes, with an
            initialisation or with an earlier end of its own.
    """
    for side, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
        if stack.init != "auto":
            raise UserError(f"model.{side}.init is {stack.init}, but a study sets it for every run; leave it at "
                            f"auto and say --inits {stack.init}")
    for name in STOP_CONDITIONS.keys() - {"updates"}:
        never = type(recipe.train).model_fields[name].default
        if (value := getattr(recipe.train, name)) != never:
            raise UserError(f"train.{name} is {value}, but every run of a study goes to its last update, "
                            f"train.updates; set train.{name}={'null' if never is None else never}")
    pairs = [block_pair(word) for word in blocks or (*BLOCKS, *HYBRIDS)]
    listed = []
    for layers in depths:
        for warmup in warmups or [recipe.schedule.warmup]:
            listed.append(System(REFERENCE, REFERENCE, layers, warmup, source=False))
            listed += dict.fromkeys(System(encoder, decoder, layers, warmup, init=init).plain()
                                    for init in inits for encoder, decoder in pairs)
    for system in listed:
        system.recipe(recipe)
    return listed


def study(
    recipe: Recipe, output: Path, systems: Sequence[System], count: int, max_seconds: float = math.inf
) -> str:
    """Does the runs that `output` lacks and writes `runs.jsonl`, `blocks.md` and `blocks.png` there; returns the table.

    Args:
        systems: of `list_systems`.
        count: processes, each on a run of its own with the recipe's threads.
        max_seconds: no run is begun after so many.

    Raises:
        UserError: no prepared data, or a folder that cannot be written or holds a `runs.jsonl` of something else.
    """
    settings = shared_settings(recipe, open_prepared(recipe))
    make_run_folder(output, "--output")
    file = output / "runs.jsonl"

    def done() -> list[Record | None]:
        """The run of each system with these settings, None where it was not done."""
        runs = [run for run in read_study(file) if _completed(run["settings"]) == _completed(settings)]
        return [next((run for run in runs if run["system"] == asdict(system)), None) for system in systems]

    left = [system for system, run in zip(systems, done(), strict=True) if run is None]
    records = _results(left, recipe, count, time.monotonic() + max_seconds)
    for number, [record] in enumerate(append_runs(file, ([record] for record in records)), 1):
        system = System(**record["system"])
        print_status(f"{number} of {len(left)}: {system.name} {system.layers}L-{system.layers}L: "
              f"{_text(record['valid'])} ({record['seconds']:.0f} s)")
    found = [run for run in done() if run is not None]
    missing = len(systems) - len(found)
    text = table(found) + (f"\n\n{missing} runs are missing; the same command goes on." if missing else "")
    (output / "blocks.md").write_text(text + "\n", encoding="utf-8")
    if not found:
        return text
    plot_study(panels(found), output / "blocks.png",
               f"Training loss by residual block, {recipe.train.updates:,} updates of one recipe")
    return f"{text}\n{output / 'blocks.png'}"


def read_study(file: Path) -> list[Record]:
    """The runs of a study's file, see `read_runs`."""

    def update(run: Record) -> None:
        """Older lines name no initialisation, which was auto, and tell which parameters no decay was on."""
        run["system"].setdefault("init", "auto")
        if not run["settings"]["optimizer"]["weight_decay"]:
            run["settings"]["optimizer"].pop("decay_norms_and_biases", None)

    keys = {"system", "settings", "parameters", "losses", "ended", "valid", "exchanged", "frequencies", "even"}
    return read_runs(file, "a block study", keys, update, None, "mend it, or give another folder",
                     "set --output to a new folder, or one of compare-blocks")


def shared_settings(recipe: Recipe, data: PreparedData) -> dict[str, Any]:
    """What all runs of a study share, as it stands in each of their lines; runs of other settings are other runs."""
    tree = recipe.model_dump()
    for side in ("encoder", "decoder"):
        tree["model"][side] = {"init": tree["model"][side]["init"]}
    tree["schedule"].pop("warmup")
    if not recipe.optimizer.weight_decay:
        tree["optimizer"].pop("decay_norms_and_biases")  # of nothing
    tree["train"] = {key: tree["train"][key] for key in ("updates", "label_smoothing", "clip")}
    kept = {key: tree[key] for key in ("seed", "batch", "model", "admin", "optimizer", "schedule", "train")}
    return {**kept, "data": data.fingerprint}


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of those that a line lacks, because it is older than they are."""
    defaults = {name: field.default.model_dump() for name, field in Recipe.model_fields.items()
                if isinstance(field.default, Section)}
    return {name: {**defaults.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in settings.items()}


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


# -- one run -----------------------------------------------------------------------------------------------------------


def run_system(system: System, recipe: Recipe, ranks: Ranks) -> Record:
    """Trains one system from scratch to the recipe's last update and validates it; the run's line.

    Of the line: `losses` are means of ten updates each, None where one is not finite (the last may be of fewer),
    `valid` the validation loss, `exchanged` that with exchanged sources, `frequencies` and `even` the marks, all plain,
    in nats a target token; `ended`: whether it came to its last update; `dropped`: updates whose gradient was not
    finite.

    Raises:
        UserError: no prepared data, a validation text of one sentence, or a recipe for several processes.
    """
    made = system.recipe(recipe)
    data = open_prepared(made)
    valid = data.split("valid").truncated(made.model.max_length)
    if len(valid) < 2:
        raise UserError(f"the validation text has {len(valid)} sentence(s), but sources are exchanged between two; "
                        "give a longer one with data.valid")
    source, target = (vocab.size for vocab in data.vocabs())
    started = time.monotonic()
    engine = start_engine(made, Layout(), (source, target), ranks, profile_for(made, data, ranks))
    stream = (Stream if system.source else _Sourceless)(data.split("train"), made.batch.tokens, made.seed)
    state, losses = TrainState(), []
    for done in updates(engine, stream, made, state, ranks):
        losses.append(done.nll / done.update.tokens)
        if done.give_up or state.update == made.train.updates:
            break
    own, exchanged = (_number(validation_loss(engine, valid, made.batch.tokens, ranks, sources))
                      for sources in (("own", "exchanged") if system.source else ("none", "exchanged")))
    record = {
        "system": asdict(system), "settings": shared_settings(recipe, data), "parameters": engine.parameters,
        "losses": [_number(fmean(losses[start : start + INTERVAL])) for start in range(0, len(losses), INTERVAL)],
        "dropped": state.skipped, "ended": state.update == made.train.updates,
        "valid": own, "exchanged": exchanged if system.source else None,
        "frequencies": frequencies_loss(data.split("train"), valid, target), "even": math.log(target),
        "seconds": round(time.monotonic() - started, 1),
    }
    engine.close()
    return record


class _Sourceless(Stream):
    """The same targets without their sources."""

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        return without_source(super().batch(epoch, index, device))


def _number(value: float) -> float | None:
    """Four digits, or None for what JSON has no word for."""
    return round(value, 4) if math.isfinite(value) else None


def validation_loss(
    engine: Engine, split: Split, tokens: int, ranks: Ranks, sources: Literal["own", "exchanged", "none"]
) -> float:
    """The plain loss of a whole text, nats a target token.

    Args:
        tokens: of a batch.
        sources: "own"; "exchanged": each sentence has that of the one before it in order of length, the first that of
            the last; "none": empty ones.
    """
    plan = plan_eval(split.src_lengths, split.trg_lengths, tokens)
    before = np.roll(plan.order, 1)
    batches = []
    for number in range(len(plan)):
        batch = collate(split, plan[number], 0, ranks.device)
        if sources == "exchanged":
            other = collate(split, before[plan.starts[number] : plan.starts[number + 1]], 0, ranks.device)
            batch = replace(batch, tensors=(*other.tensors[:2], *batch.tensors[2:]))
        batches.append(without_source(batch) if sources == "none" else batch)
    return sum(nll for _, nll in engine.evaluate(batches)) / sum(batch.tokens for batch in batches)


def without_source(batch: Batch) -> Batch:
    """The same targets, beside sources of nothing but the end of the sentence, [B, 1]."""
    src, lengths, *target = batch.tensors
    return replace(batch, tensors=(src.new_full((len(src), 1), EOS), torch.ones_like(lengths), *target))


def frequencies_loss(train: Split, valid: Split, vocab: int) -> float:
    """Nats a target token of the validation text by the tokens' frequencies in the training text, each counted once
    more so that none is 0."""

    def count(split: Split) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How often each token is a target, eos included, [V]."""
        counts = np.zeros(vocab)
        for start in range(0, len(split), _CHUNK):
            ids, _ = split.targets.with_eos(np.arange(start, min(start + _CHUNK, len(split))))
            counts += np.bincount(ids[ids != PAD], minlength=vocab)
        return counts

    learned, told = 1.0 + count(train), count(valid)
    return float(-(told * np.log(learned / learned.sum())).sum() / told.sum())


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


class _Group(NamedTuple):
    """The runs of one depth and warm-up, and what each came to, by name."""

    title: str
    runs: dict[str, Record]
    outcomes: dict[str, str]


def _groups(records: Iterable[Record]) -> list[_Group]:
    """The warm-up is told where there are several."""
    runs: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        system = System(**record["system"])
        runs.setdefault((system.layers, system.warmup), {})[system.name] = record
    several = len({warmup for _, warmup in runs}) > 1
    groups = []
    for (layers, warmup), group in runs.items():
        warm = f", warm-up {warmup}" if warmup else ", no warm-up"
        target_only = next((run["valid"] for run in group.values() if not run["system"]["source"]), None)
        groups.append(_Group(f"{layers}L-{layers}L{warm if several else ''}", group,
                             {name: outcome(run, target_only) for name, run in group.items()}))
    return groups


def table(records: Sequence[Record]) -> str:
    """A Markdown table with a row for each system and four columns for each depth and warm-up, best first group first,
    and what the words mean."""
    groups = _groups(records)
    systems = {name: System(**run["system"]) for group in groups for name, run in group.runs.items()}

    def losses(name: str) -> list[float]:
        found = [group.runs[name]["valid"] if name in group.runs else None for group in groups]
        return [math.inf if loss is None else loss for loss in found]

    head = ["system", "initialisation"]
    for group in groups:
        head += [f"{group.title}: parameters", "validation", "shuffled", "outcome"]
    rows = [head]
    for name in sorted(systems, key=losses):
        row = [systems[name].word, systems[name].initialisation]
        for group in groups:
            if name not in group.runs:
                row += [""] * 4
                continue
            run = group.runs[name]
            valid, exchanged = run["valid"], run["exchanged"]
            cost = "–" if valid is None or exchanged is None else f"{exchanged - valid:+.2f}"
            row += [f"{run['parameters']:,}", _text(valid), cost, group.outcomes[name]]
        rows.append(row)
    text = markdown_table(rows)
    if not records:
        return f"{text}\n\nNo run was done yet."
    frequencies, even = records[0]["frequencies"], records[0]["even"]
    return (f"{text}\n\nPlain loss of the validation text after {records[0]['settings']['train']['updates']:,} updates,"
            f" nats a target token; shuffled: how much it rises with another sentence's source. An even guess "
            f"has {even:.3f}, the tokens' frequencies {frequencies:.3f}. diverged: not finite, or worse than an even "
            f"guess; stuck: above {frequencies - MARGIN:.3f}; target only: not below {REFERENCE} without sources, or "
            f"not more than {MARGIN} higher with shuffled sources; learned: both.")


def _text(loss: float | None) -> str:
    if loss is None:
        return "not finite"
    return f"{loss:.3f}" if loss < 100 else f"{loss:.3g}"


def panels(records: Sequence[Record]) -> list[Panel]:
    """The curves of each depth, warm-up and initialisation asked for."""
    made = []
    for title, runs, outcomes in _groups(records):
        for init in dict.fromkeys(run["system"]["init"] for run in runs.values()):
            chosen = {System(**run["system"]).word: (run, outcomes[name]) for name, run in runs.items()
                      if run["system"]["init"] == init}
            curves = {word: [(INTERVAL * number, loss) for number, loss in enumerate(run["losses"], 1)
                             if loss is not None] for word, (run, _) in chosen.items()}
            first, _ = next(iter(chosen.values()))
            made.append(Panel(title if init == "auto" else f"{title}, init: {init}", curves,
                              {word: result for word, (_, result) in chosen.items()},
                              {"even guess": first["even"], "frequencies": first["frequencies"]}))
    return made
