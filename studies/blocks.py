"""Which blocks learn at depth: many runs of one recipe on real text, one table, one picture.

Every run is one line of `runs.jsonl`. Existing runs are not repeated, so the same command resumes a stopped study, or
adds blocks to it. The outcome follows from the validation loss, which is compared with three baselines in nats a target
token: guessing evenly among the tokens, log V; the tokens' frequencies; and a model of the same recipe trained without
sources. To test whether a model uses its sources, it is validated again with shuffled sources: every sentence gets the
source of another one of similar length, and the loss must rise. The outcome of a run:

    diverged     non-finite updates ended it, or it is worse than an even guess among the tokens
    stuck        no better than the tokens' frequencies, within 0.1 nats
    target only  better, but no better than `pre_ln` of the same depth and recipe trained without sources, or not
                 worse by 0.1 nats with shuffled sources
    learned      better than that baseline, and worse by more than 0.1 nats with shuffled sources

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
from deepnmt.training.profile import profile_for
from deepnmt.training.state import TrainState
from deepnmt.training.trainer import STOP_CONDITIONS
from deepnmt.training.updates import updates
from studies.plots import Panel, plot_study
from studies.runs import Record, Stacks, append_runs, block_pair, read_runs

HYBRIDS = ("post_ln/pre_ln", "pre_ln/post_ln")  # the first is in the Admin paper's Table 1
REFERENCE = "pre_ln"  # the block that is trained without sources
INTERVAL = 10  # updates per point of a curve: their mean loss
MARGIN = 0.1  # nats; smaller differences to frequencies and shuffled sources do not count
_CHUNK = 1000  # sentences read at a time


@dataclass(frozen=True)
class Variant(Stacks):
    """The settings in which runs of a study differ: the blocks, the layers of each stack and the updates of warm-up;
    `source`: whether the model sees the sources, or an empty one for each sentence; `init`: of both stacks."""

    warmup: int
    source: bool = True
    init: Init = "auto"

    @property
    def word(self) -> str:
        """The blocks, and whether the model sees the sources."""
        return self.blocks if self.source else f"{self.blocks}, no source"

    @property
    def name(self) -> str:
        """The word, and the initialisation if it is not auto."""
        return self.word if self.init == "auto" else f"{self.word}, {self.init}"

    @property
    def initialisation(self) -> str:
        """The meaning of `init` for these blocks: `xavier`, `depth_scaled`, or two joined by a slash."""
        return "/".join(dict.fromkeys(self.initialisations(self.init)))

    def canonical(self) -> Variant:
        """The same run with init: auto, if that means the same for these blocks; otherwise this one."""
        auto = replace(self, init="auto")
        return auto if auto.initialisation == self.initialisation else self

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this variant's blocks, initialisation, depth and warm-up.

        Raises:
            UserError: the settings do not fit together, or the recipe is for several processes.
        """
        if recipe.parallel.ds_config is not None:
            raise UserError(f"parallel.ds_config is {recipe.parallel.ds_config}, but each run of a study trains "
                            "on one process without DeepSpeed; set parallel.ds_config=null")
        tree = recipe.model_dump()
        for side in ("encoder", "decoder"):
            tree["model"][side] |= {"block": getattr(self, side), "layers": self.layers, "init": self.init}
        tree["schedule"]["warmup"] = self.warmup
        return check_recipe(tree, f"the recipe with {self.name}, {self.layers} layers, schedule.warmup {self.warmup}")


def list_variants(
    recipe: Recipe, blocks: Sequence[str] | None = None, depths: Sequence[int] = (18, 36),
    warmups: Sequence[int] | None = None, inits: Sequence[Init] = ("auto",),
) -> list[Variant]:
    """The variants of a study, shallow ones first; every depth and warm-up also has a run without sources.

    Args:
        blocks: blocks, or encoder/decoder pairs such as `post_ln/pre_ln` (None: all blocks and `HYBRIDS`).
        depths: layers of each stack.
        warmups: updates of warm-up (None: the recipe's).
        inits: initialisations of both stacks; those with the same meaning for a variant are listed once.

    Raises:
        UserError: an unknown block, an impossible recipe, or one that uses several processes, sets the initialisation
            or ends before `train.updates`.
    """
    for side, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
        if stack.init != "auto":
            raise UserError(f"model.{side}.init is {stack.init}, but the study sets it for every run; set it to "
                            f"auto and use --inits {stack.init}")
    for name in STOP_CONDITIONS.keys() - {"updates"}:
        never = type(recipe.train).model_fields[name].default
        if (value := getattr(recipe.train, name)) != never:
            raise UserError(f"train.{name} is {value}, but every run of a study trains for all "
                            f"train.updates; set train.{name}={'null' if never is None else never}")
    pairs = [block_pair(word) for word in blocks or (*BLOCKS, *HYBRIDS)]
    listed = []
    for layers in depths:
        for warmup in warmups or [recipe.schedule.warmup]:
            listed.append(Variant(REFERENCE, REFERENCE, layers, warmup, source=False))
            listed += dict.fromkeys(Variant(encoder, decoder, layers, warmup, init=init).canonical()
                                    for init in inits for encoder, decoder in pairs)
    for variant in listed:
        variant.recipe(recipe)
    return listed


def study(
    recipe: Recipe, output: Path, variants: Sequence[Variant], count: int, max_seconds: float = math.inf
) -> str:
    """Trains the runs that are missing in `output`; writes `runs.jsonl`, `blocks.md` and `blocks.png` there and returns
    the table.

    Args:
        variants: of `list_variants`.
        count: simultaneous runs, each in one process with the recipe's threads.
        max_seconds: no run starts after this time.

    Raises:
        UserError: the prepared data are missing, or the folder cannot be written or has a `runs.jsonl` of another kind.
    """
    settings = shared_settings(recipe, open_prepared(recipe))
    make_run_folder(output, "--output")
    file = output / "runs.jsonl"

    def done() -> list[Record | None]:
        """The run of each variant with these settings, None if it is missing."""
        runs = [run for run in read_study(file) if _completed(run["settings"]) == _completed(settings)]
        return [next((run for run in runs if run["system"] == asdict(variant)), None) for variant in variants]

    left = [variant for variant, run in zip(variants, done(), strict=True) if run is None]
    records = _results(left, recipe, count, time.monotonic() + max_seconds)
    for number, [record] in enumerate(append_runs(file, ([record] for record in records)), 1):
        variant = Variant(**record["system"])
        print_status(f"{number} of {len(left)}: {variant.name} {variant.layers}L-{variant.layers}L: "
              f"{_text(record['valid'])} ({record['seconds']:.0f} s)")
    finished = [run for run in done() if run is not None]
    missing = len(variants) - len(finished)
    left_over = f"\n\n{missing} runs are missing; run the same command again to train them." if missing else ""
    text = table(finished) + left_over
    (output / "blocks.md").write_text(text + "\n", encoding="utf-8")
    if not finished:
        return text
    plot_study(panels(finished), output / "blocks.png",
               f"Training loss by residual block, {recipe.train.updates:,} updates of one recipe")
    return f"{text}\n{output / 'blocks.png'}"


def read_study(file: Path) -> list[Record]:
    """The runs of a study's file, see `read_runs`."""

    def update(run: Record) -> None:
        """Older lines have no initialisation (it was auto), and list decay settings even without decay."""
        run["system"].setdefault("init", "auto")
        if not run["settings"]["optimizer"]["weight_decay"]:
            run["settings"]["optimizer"].pop("decay_norms_and_biases", None)

    keys = {"system", "settings", "parameters", "losses", "ended", "valid", "exchanged", "frequencies", "even"}
    return read_runs(file, "a block study", keys, update, None, "repair it, or set --output to another folder",
                     "set --output to a new folder, or one of compare-blocks")


def shared_settings(recipe: Recipe, data: PreparedData) -> dict[str, Any]:
    """The settings that all runs of a study share, as written into each line; a run with others is another run."""
    tree = recipe.model_dump()
    for side in ("encoder", "decoder"):
        tree["model"][side] = {"init": tree["model"][side]["init"]}
    tree["schedule"].pop("warmup")
    if not recipe.optimizer.weight_decay:
        tree["optimizer"].pop("decay_norms_and_biases")  # no effect without decay
    tree["train"] = {key: tree["train"][key] for key in ("updates", "label_smoothing", "clip")}
    kept = {key: tree[key] for key in ("seed", "batch", "model", "admin", "optimizer", "schedule", "train")}
    return {**kept, "data": data.fingerprint}


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with defaults for those that are newer than the line."""
    defaults = {name: field.default.model_dump() for name, field in Recipe.model_fields.items()
                if isinstance(field.default, Section)}
    return {name: {**defaults.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in settings.items()}


def _results(variants: Sequence[Variant], recipe: Recipe, count: int, deadline: float) -> Iterator[Record]:
    """The variants' records as they finish, from `count` processes at a time; none starts after the deadline."""
    remaining = iter(variants)
    if count == 1:
        for variant in remaining:
            if time.monotonic() > deadline:
                return
            yield _run(variant, recipe)
        return
    others = set(active_children())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        running: set[Future[Record]] = set()
        try:
            while True:
                if time.monotonic() <= deadline:
                    free = count - len(running)
                    running |= {submit(pool, _run, variant, recipe) for variant in islice(remaining, free)}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BaseException:  # Ctrl-C, too; runs take hours, so they are stopped
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _run(variant: Variant, recipe: Recipe) -> Record:
    with processes(recipe.parallel.threads or 1) as ranks:
        return run_variant(variant, recipe, ranks)


# -- one run -----------------------------------------------------------------------------------------------------------


def run_variant(variant: Variant, recipe: Recipe, ranks: Ranks) -> Record:
    """Trains one variant from scratch to the recipe's last update and validates it; returns the run's line.

    In the line, all losses are plain, in nats a target token: `losses` are means of ten updates each (the last of what
    is left), None if one is not finite; `valid` is the validation loss, `exchanged` that with shuffled sources,
    `frequencies` and `even` are the baselines. `ended`: whether it reached the last update; `dropped`: number of
    updates with a non-finite gradient.

    Raises:
        UserError: the prepared data are missing, the validation text has one sentence, or the recipe is for several
            processes.
    """
    made = variant.recipe(recipe)
    data = open_prepared(made)
    valid = data.split("valid").truncated(made.model.max_length)
    if len(valid) < 2:
        raise UserError(f"the validation text has {len(valid)} sentence(s), but shuffling the sources needs two; "
                        "set data.valid to a longer text")
    source, target = (vocab.size for vocab in data.vocabs())
    started = time.monotonic()
    engine = start_engine(made, Layout(), (source, target), ranks, profile_for(made, data, ranks))
    stream = (Stream if variant.source else _Sourceless)(data.split("train"), made.batch.tokens, made.seed)
    state, losses = TrainState(), []
    for done in updates(engine, stream, made, state, ranks):
        losses.append(done.nll / done.update.tokens)
        if done.give_up or state.update == made.train.updates:
            break
    own, exchanged = (_number(validation_loss(engine, valid, made.batch.tokens, ranks, sources))
                      for sources in (("own", "exchanged") if variant.source else ("none", "exchanged")))
    record = {
        "system": asdict(variant), "settings": shared_settings(recipe, data), "parameters": engine.parameters,
        "losses": [_number(fmean(losses[start : start + INTERVAL])) for start in range(0, len(losses), INTERVAL)],
        "dropped": state.skipped, "ended": state.update == made.train.updates,
        "valid": own, "exchanged": exchanged if variant.source else None,
        "frequencies": frequencies_loss(data.split("train"), valid, target), "even": math.log(target),
        "seconds": round(time.monotonic() - started, 1),
    }
    engine.close()
    return record


class _Sourceless(Stream):
    """A stream of the same targets, with empty sources."""

    def batch(self, epoch: int, index: int, device: torch.device) -> Batch:
        return without_source(super().batch(epoch, index, device))


def _number(value: float) -> float | None:
    """The value to four digits; None if it is not finite, which JSON cannot express."""
    return round(value, 4) if math.isfinite(value) else None


def validation_loss(
    engine: Engine, split: Split, tokens: int, ranks: Ranks, sources: Literal["own", "exchanged", "none"]
) -> float:
    """The plain loss of a whole text, nats a target token.

    Args:
        tokens: of a batch.
        sources: "own"; "exchanged": shuffled, each sentence gets that of its predecessor in the order of length, the
            first one that of the last; "none": empty ones.
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
    """The batch with the same targets, and sources that consist of eos only, [B, 1]."""
    src, lengths, *target = batch.tensors
    return replace(batch, tensors=(src.new_full((len(src), 1), EOS), torch.ones_like(lengths), *target))


def frequencies_loss(train: Split, valid: Split, vocab: int) -> float:
    """Cross-entropy of the validation text under the tokens' frequencies in the training text, in nats a target token;
    every count is raised by 1, so that none is 0."""

    def count(split: Split) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How often each token is a target, eos included, [V]."""
        counts = np.zeros(vocab)
        for start in range(0, len(split), _CHUNK):
            ids, _ = split.targets.with_eos(np.arange(start, min(start + _CHUNK, len(split))))
            counts += np.bincount(ids[ids != PAD], minlength=vocab)
        return counts

    trained, tested = 1.0 + count(train), count(valid)
    return float(-(tested * np.log(trained / trained.sum())).sum() / tested.sum())


# -- outcomes ----------------------------------------------------------------------------------------------------------


def outcome(record: Record, target_only: float | None) -> str:
    """A run's outcome, see above; `target_only`: the loss of the run without sources, None if that is missing."""
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
    """The runs of one depth and warm-up and their outcomes, by name."""

    title: str
    runs: dict[str, Record]
    outcomes: dict[str, str]


def _groups(records: Iterable[Record]) -> list[_Group]:
    """Groups of runs; the titles name the warm-up if there are several."""
    runs: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        variant = Variant(**record["system"])
        runs.setdefault((variant.layers, variant.warmup), {})[variant.name] = record
    several = len({warmup for _, warmup in runs}) > 1
    groups = []
    for (layers, warmup), group in runs.items():
        warm = f", warm-up {warmup}" if warmup else ", no warm-up"
        target_only = next((run["valid"] for run in group.values() if not run["system"]["source"]), None)
        groups.append(_Group(f"{layers}L-{layers}L{warm if several else ''}", group,
                             {name: outcome(run, target_only) for name, run in group.items()}))
    return groups


def table(records: Sequence[Record]) -> str:
    """A Markdown table with a row for each variant and four columns for each depth and warm-up, sorted by the loss
    in the first group, and an explanation of the outcomes."""
    groups = _groups(records)
    variants = {name: Variant(**run["system"]) for group in groups for name, run in group.runs.items()}

    def losses(name: str) -> list[float]:
        own = [group.runs[name]["valid"] if name in group.runs else None for group in groups]
        return [math.inf if loss is None else loss for loss in own]

    head = ["block", "initialisation"]
    for group in groups:
        head += [f"{group.title}: parameters", "validation", "shuffled", "outcome"]
    rows = [head]
    for name in sorted(variants, key=losses):
        row = [variants[name].word, variants[name].initialisation]
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
        return f"{text}\n\nNo run is finished yet."
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
    """The curves, with a panel for each depth, warm-up and initialisation."""
    made = []
    for title, runs, outcomes in _groups(records):
        for init in dict.fromkeys(run["system"]["init"] for run in runs.values()):
            chosen = {Variant(**run["system"]).word: (run, outcomes[name]) for name, run in runs.items()
                      if run["system"]["init"] == init}
            curves = {word: [(INTERVAL * number, loss) for number, loss in enumerate(run["losses"], 1)
                             if loss is not None] for word, (run, _) in chosen.items()}
            first, _ = next(iter(chosen.values()))
            made.append(Panel(title if init == "auto" else f"{title}, init: {init}", curves,
                              {word: result for word, (_, result) in chosen.items()},
                              {"even guess": first["even"], "frequencies": first["frequencies"]}))
    return made
