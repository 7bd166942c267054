"""Which blocks learn at depth: many runs of one recipe on real text, their tables and one picture.

Every run is one line of a file. Existing runs are not repeated, so the same command resumes a stopped study, or adds
blocks or seeds to it. With learning rates to search, every block is first trained for fewer updates at each of them;
its own runs take the one at which the source is worth most. The loss of a short run would not do: a model whose encoder
has collapsed wins it as a language model of the target. `outcomes.py` says what the words of the tables mean.

`B` sentences, `S` source length, `V` target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import Contents, write_checkpoint
from deepnmt.config import Recipe, dump_recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.batching import Sentences, Stream, collate, plan_eval
from deepnmt.data.encoding import end_with_parent, submit
from deepnmt.data.prepared import PreparedData, Split, open_prepared
from deepnmt.decode.translate import translate_lines
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import load_test_sets
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.files import make_parent_folder, make_run_folder
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.tokens import EOS, PAD
from deepnmt.training.profile import profile_for
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates
from studies import layers
from studies.outcomes import INTERVAL, panels, search_table, table, text_of, worth_of
from studies.plots import plot_study
from studies.runs import Record, append_runs
from studies.scores import bleu, pack, sentence_counts, with_totals
from studies.variants import Variant, read_study, same_settings, shared_settings

_BEYOND = 3  # learning rates that a search tries beyond the given ones
_CHUNK = 1000  # sentences read at a time


@dataclass(frozen=True)
class Plan:
    """How a study is run.

    Attributes:
        seeds: of the runs of every variant (none: the recipe's); a variant without sources is trained with the first.
        rates: peak learning rates to search for every variant, see `further_rates` (none: no search, the recipe's, as
            always without sources). The search has the recipe's seed.
        search_updates: updates of a run of the search (None: a third of the recipe's, or what the rise of
            `optimizer.lr_factors_until` takes); its warm-up is the same.
        processes: simultaneous runs, each in one process with the recipe's threads.
        seconds: no run starts after this time.
        runs: the file of runs (None: `runs.jsonl` in the output folder).
        keep_weights: whether to keep every run's last weights, as a checkpoint in `weights` in the output folder.
    """

    seeds: Sequence[int] = ()
    rates: Sequence[float] = ()
    search_updates: int | None = None
    processes: int = 1
    seconds: float = math.inf
    runs: Path | None = None
    keep_weights: bool = False


def study(recipe: Recipe, output: Path, variants: Sequence[Variant], plan: Plan) -> str:
    """Trains the runs that are missing in the file of runs; writes `blocks.md`, `blocks.png` and `layers.png`
    into `output` and returns the tables.

    Args:
        variants: of `list_variants`.

    Raises:
        UserError: the prepared data are missing, or the folder cannot be written or has a `runs.jsonl` of another kind;
            or the search would end before all parts have their whole rates.
    """
    risen = min(recipe.train.updates, 2 * recipe.optimizer.lr_factors_until)
    short = plan.search_updates or max(1, recipe.train.updates // 3, risen)
    if plan.rates and short < risen:  # a rate may suit the slow parts and be too high for them when it has risen
        raise UserError(f"--search-updates is {short}, but because of optimizer.lr_factors_until "
                        f"({recipe.optimizer.lr_factors_until}) parts of the model learn at lower rates until update "
                        f"{risen}; give {risen} or more")
    for variant in variants:  # so that a fault ends the study before its first run
        for seed in plan.seeds:
            replace(variant, seed=seed).recipe(recipe)
        for rate in plan.rates:
            replace(variant, rate=rate, updates=short).recipe(recipe)
    settings = shared_settings(recipe, open_prepared(recipe))
    make_run_folder(output, "--output")
    file, deadline = plan.runs or output / "runs.jsonl", time.monotonic() + plan.seconds
    make_parent_folder(file, "--runs")
    known = {Variant(**run["system"]): run for run in reversed(read_study(file))
             if same_settings(run["settings"], settings)}
    missing = 0

    def trained(wanted: Sequence[Variant]) -> list[Record]:
        """The runs of these variants, the missing ones trained; fewer if the time is over."""
        nonlocal missing
        left = [variant for variant in dict.fromkeys(wanted) if variant not in known]
        records = results_of(left, recipe, plan.processes, deadline, output / "weights" if plan.keep_weights else None)
        for number, [record] in enumerate(append_runs(file, ([record] for record in records)), 1):
            variant = Variant(**record["system"])
            known[variant] = record
            print_status(f"{number} of {len(left)}: {variant.text}: {text_of(record['valid'])} "
                         f"({record['seconds']:.0f} s)")
        missing = sum(variant not in known for variant in left)
        return [known[variant] for variant in dict.fromkeys(wanted) if variant in known]

    rate_of, searched = {variant: variant.rate for variant in variants}, []
    if plan.rates:
        tried: dict[Variant, dict[float, float]] = {variant: {} for variant in variants if variant.source}
        while points := {replace(variant, rate=rate, updates=short): variant for variant, worth in tried.items()
                         for rate in further_rates(plan.rates, worth)}:
            searched += (runs := trained(list(points)))
            for run in runs:
                point = Variant(**run["system"])
                tried[points[point]][point.rate] = worth_of(run)
            if missing:
                break
        rate_of |= {variant: max(worth, key=worth.__getitem__) for variant, worth in tried.items() if worth}
    finished: list[Record] = []
    if not missing:
        first, *others = plan.seeds or [recipe.seed]
        finished = trained([replace(variant, rate=rate_of[variant], seed=seed) for seed in (first, *others)
                            for variant in variants if variant.source or seed == first])
    profiled = _by_depth(finished)
    text = "\n\n".join(filter(None, [
        table(finished), *(layers.table(groups) for groups in profiled.values()),
        search_table(searched) if searched else "",
        f"{missing} runs are missing; run the same command again to train them." if missing else ""]))
    (output / "blocks.md").write_text(text + "\n", encoding="utf-8")
    if not finished:
        return text
    plot_study(panels(finished), output / "blocks.png",
               f"Training loss by residual block, {recipe.train.updates:,} updates of one recipe")
    pictures = [output / "blocks.png"]
    if profiled:
        pictures.append(output / "layers.png")
        layers.plot(profiled[max(profiled)], pictures[-1])
    return "\n".join([text, "", *map(str, pictures)])


def further_rates(rates: Sequence[float], worth: Mapping[float, float]) -> list[float]:
    """The learning rates that a search still needs: the given ones; then, while the best is the lowest or the highest,
    the next one beyond it at the same ratio, at most `_BEYOND` of them.

    Args:
        rates: to begin with.
        worth: what the source is worth at those that were tried.
    """
    if missing := [rate for rate in rates if rate not in worth]:
        return missing
    tried = sorted(worth)
    best = max(tried, key=worth.__getitem__)
    if len(tried) < 2 or len(tried) >= len(set(rates)) + _BEYOND or best not in (tried[0], tried[-1]):
        return []
    return [float(f"{best * best / (tried[1] if best == tried[0] else tried[-2]):.3g}")]


def results_of(
    variants: Sequence[Variant], recipe: Recipe, count: int, deadline: float, weights: Path | None = None
) -> Iterator[Record]:
    """The variants' records as they finish, from `count` processes at a time; none starts after the deadline."""
    remaining = iter(variants)
    if count == 1:
        for variant in remaining:
            if time.monotonic() > deadline:
                return
            yield _run(variant, recipe, weights)
        return
    others = set(active_children())
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        running: set[Future[Record]] = set()
        try:
            while True:
                if time.monotonic() <= deadline:
                    free = count - len(running)
                    running |= {submit(pool, _run, variant, recipe, weights) for variant in islice(remaining, free)}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BaseException:  # Ctrl-C, too; runs take hours, so they are stopped
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _run(variant: Variant, recipe: Recipe, weights: Path | None) -> Record:
    with processes(recipe.parallel.threads or 1, device=recipe.parallel.device) as ranks:
        return run_variant(variant, recipe, ranks, weights)


# -- one run -----------------------------------------------------------------------------------------------------------


def run_variant(variant: Variant, recipe: Recipe, ranks: Ranks, weights: Path | None = None) -> Record:
    """Trains one variant from scratch to the recipe's last update and validates it; returns the run's line.

    In the line, all losses are plain, in nats a target token: `losses` are means of ten updates each (the last of what
    is left), None if one is not finite; `valid` is the validation loss, `exchanged` that with shuffled sources,
    `frequencies` and `even` are the baselines. `ended`: whether it reached the last update; `dropped`: number of
    updates with a non-finite gradient. `tests` and `layers`: of a run of all the recipe's updates.

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
    started, started_cpu = time.monotonic(), time.process_time()
    engine = start_engine(made, Layout(), (source, target), ranks, profile_for(made, data, ranks))
    stream = (Stream if variant.source else Sourceless)(data.split("train"), made.batch.tokens, made.seed)
    state, losses = TrainState(), []
    for done in updates(engine, stream, made, state, ranks):
        losses.append(done.stats.nll / done.update.tokens)
        if done.give_up or state.update == made.train.updates:
            break
    cpu_seconds = time.process_time() - started_cpu
    own, exchanged = (_number(validation_loss(engine, valid, made.batch.tokens, ranks, sources))
                      for sources in (("own", "exchanged") if variant.source else ("none", "exchanged")))
    whole = variant.source and variant.updates == recipe.train.updates
    record = {
        "system": asdict(variant), "settings": shared_settings(recipe, data), "parameters": engine.parameters,
        "losses": [_number(fmean(losses[start : start + INTERVAL])) for start in range(0, len(losses), INTERVAL)],
        "dropped": state.skipped, "ended": state.update == made.train.updates,
        "valid": own, "exchanged": exchanged if variant.source else None,
        "frequencies": frequencies_loss(data.split("train"), valid, target), "even": math.log(target),
        "tokens": state.target_tokens, "cpu_seconds": round(cpu_seconds, 1),
        "tests": _test_scores(made, data, engine) if whole else {},
        "layers": layers.measure(engine.gather_model(), valid, made.batch.tokens, ranks.device) if whole else {},
        "seconds": round(time.monotonic() - started, 1),
    }
    if weights is not None:
        tensors = {part.name: part.weight.view(part.shape) for part in engine.owned()}  # one process owns all
        write_checkpoint(weights / variant.folder, Contents(tensors, None, state.to_saved(), dump_recipe(made),
                                                            TRANSLATION.files(data)))
    engine.close()
    return record


def _test_scores(recipe: Recipe, data: PreparedData, engine: Engine) -> dict[str, Any]:
    """For each of the recipe's test sets the BLEU and the packed `sentence_counts` of the model's translation; nothing
    if the model's scores are NaN."""
    scorer = make_scorers(recipe.data.trg_lang)["bleu"]
    scores = {}
    for test in load_test_sets(recipe, None) if recipe.data.test else []:
        try:
            best = translate_lines(engine.gather_model(), data.vocabs(), test.sources, recipe.translate,
                                   seed=recipe.seed, warn=False)
        except UserError:
            return {}
        counts = sentence_counts([line[0].text for line in best], test.references[0], scorer)
        scores[test.name] = {"bleu": round(bleu(with_totals(counts).sum(axis=0)), 2), "counts": pack(counts)}
    return scores


def _by_depth(runs: Sequence[Record]) -> dict[int, dict[str, list[layers.Figures]]]:
    """What was measured of layers, by their number in a stack and by model."""
    found: dict[int, dict[str, list[layers.Figures]]] = {}
    several = len({run["system"]["warmup"] for run in runs}) > 1
    for run in runs:
        if run.get("layers"):
            variant = Variant(**run["system"])
            model = f"{variant.name} {variant.layers}L-{variant.layers}L"
            if several:
                model += f", warm-up {variant.warmup}"
            found.setdefault(variant.layers, {}).setdefault(model, []).append(run["layers"])
    return found


class Sourceless(Stream):
    """A stream of the same targets, with empty sources."""

    def collate(self, sentences: Sentences, rows: Indices, key: int, device: torch.device) -> Batch:
        return without_source(super().collate(sentences, rows, key, device))


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
            batch = batch.with_tensors(src=other["src"], src_lengths=other["src_lengths"])
        batches.append(without_source(batch) if sources == "none" else batch)
    return sum(nll for _, nll in engine.evaluate(batches)) / sum(batch.tokens for batch in batches)


def without_source(batch: Batch) -> Batch:
    """The batch with the same targets, and sources that consist of eos only, [B, 1]."""
    src, lengths = batch["src"], batch["src_lengths"]
    return batch.with_tensors(src=src.new_full((len(src), 1), EOS), src_lengths=torch.ones_like(lengths))


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
