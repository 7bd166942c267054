"""The runs that the doctor's verdict is fitted on and tested with: small models that deepnmt trains on real text.

Every run is one line of a JSON-lines file: its recipe, the trial before training (`doctor/verdict.py`), and the
outcomes measured after a quarter, a half and all of its updates (`doctor/outcome.py`). Points are drawn at random from
a seed, in a fixed order, so a stopped file is a fair sample, and the same command trains the missing ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepnmt.config import Fact, Recipe, check_recipe
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.extras.doctor.outcome import OUTCOMES, Measured, frequencies, measure_outcome
from deepnmt.extras.doctor.variants import alternatives, fresh_model, initialisation
from deepnmt.extras.doctor.verdict import (
    SHIPPED,
    SURE,
    TRIAL,
    Trial,
    VerdictRule,
    expected_rank,
    features,
    run_trial,
)
from deepnmt.files import make_parent_folder, markdown_table
from deepnmt.model.blocks import BLOCKS, SIDES
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.source_use import rows_of_corpora
from deepnmt.training.profile import profile_for
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates
from studies.plots import plot_reliability
from studies.runs import Record, append_runs, read_runs
from studies.toy_task import ToyTask
from studies.verdict_fit import (
    BINS,
    FOLDS,
    OLD,
    Example,
    Judged,
    choose,
    crossed,
    fit,
    kinds_of,
    learning_curve,
    raised,
    report,
)

# By text: source and target language, and files of training and validation text in the folder `DEEPNMT_CORPORA`. How
# they are made from what one downloads: studies/results/verdict.md.
TEXTS = {
    "multi30k": ("de", "en", "multi30k/train.{}.gz", "multi30k/val.{}.gz"),
    "europarl": ("de", "en", "europarl/train.{}", "europarl/valid.{}"),
    "tatoeba": ("de", "en", "tatoeba/train.{}", "tatoeba/valid.{}"),
    "tatoeba_fr": ("fr", "en", "tatoeba_fr/train.{}", "tatoeba_fr/valid.{}"),
    "newstest": ("de", "en", "newstest/train.{}", "newstest/valid.{}"),
    "toy": ("de", "en", "toy/train.{}", "toy/valid.{}"),
}
KINDS = ("text", "depth", "block")  # of groups that are held out in turn
_ANOTHER_SEED = 1000  # added to a run's; those that are drawn are lower
_NEAR = (0.1, 0.4)  # nats of gain: a factor of two around the mark of "translates"
_INTERVAL = 10  # updates per point of a curve: their mean loss
_KEPT = ("seed", "batch", "model", "admin", "optimizer", "schedule")  # sections of a recipe in a line
_RATES = {"good": (-2.7, -2.1), "any": (-3.3, -1.7), "wild": (-2.1, -1.3)}  # decimal logarithms, by kind of point


@dataclass(frozen=True)
class Choice:
    """What points are drawn from, and the seconds of one core that a run may take, as a rough guess."""

    texts: tuple[str, ...] = ("multi30k", "tatoeba", "multi30k", "tatoeba", "multi30k", "tatoeba", "europarl", "toy")
    depths: tuple[int, ...] = (2, 2, 2, 3, 3, 4, 4, 6, 8, 12, 18)
    blocks: tuple[str, ...] = ("post_ln", "post_ln", "pre_ln", "pre_ln", "admin", "b2t", "b2t_no_ln", "deepnorm",
                               "rezero", "fixup", "t_fixup", "admin_closed_form")
    seconds: tuple[float, float] = (0.8, 4.0)
    updates: tuple[int, ...] = (60, 120, 200, 300, 300, 400)
    tokens: tuple[int, ...] = (300, 400, 500, 600)
    widths: tuple[int, ...] = (32, 48, 64)
    encoder_rates: tuple[float, ...] = (1.0,)  # factors on the encoder's rate
    pieces: int = 1000  # of the vocabulary
    kinds: tuple[str, ...] = ("good", "good", "wild", "any")  # of points, keys of `_RATES`


_LONG = Choice(texts=("multi30k", "tatoeba", "europarl", "newstest", "tatoeba_fr"), depths=(2, 3, 4, 4, 6, 9, 12),
               blocks=("post_ln", "pre_ln", "admin", "admin", "b2t", "deepnorm", "t_fixup", "t_fixup", "rezero",
                       "dlcl"),
               seconds=(4.0, 16.0), updates=(300, 400, 600, 900, 1300, 2000, 3000), tokens=(300, 500, 800, 1200),
               widths=(48, 64, 96, 128, 192, 256), encoder_rates=(1.0, 1.0, 0.5, 0.2, 0.1, 0.05))
CHOICES = {
    "short": Choice(),
    # Longer runs of wider models, of which more than half have a slower encoder; blocks without a further parameter.
    "long": _LONG,
    # The longest, of the text that is hardest to translate, so their models are small.
    "longest": replace(_LONG, texts=("newstest", "europarl", "newstest", "europarl", "tatoeba"), depths=(2, 2, 3),
                       seconds=(40.0, 110.0), updates=(2000, 3000), tokens=(800, 1200), widths=(48, 64, 96)),
    # What `deepnmt new` might write for little text: no rate that is likely to fail, a slower encoder.
    "first": Choice(texts=("newstest", "europarl", "newstest", "europarl", "tatoeba"), depths=(3, 4, 4, 6),
                    blocks=("t_fixup", "t_fixup", "admin", "b2t", "deepnorm"), seconds=(16.0, 45.0),
                    updates=(900, 1300, 2000, 3000), tokens=(800, 1200), widths=(64, 96, 128, 192),
                    encoder_rates=(0.3, 0.2, 0.2, 0.1), kinds=("good",)),
    "first_8000": Choice(texts=("newstest", "europarl", "tatoeba", "multi30k"), depths=(3, 4, 4, 6),
                         blocks=("t_fixup", "t_fixup", "admin", "b2t", "deepnorm", "pre_ln"), seconds=(10.0, 30.0),
                         updates=(300, 600, 900, 1300), tokens=(800, 1200), widths=(96, 128, 192),
                         encoder_rates=(1.0, 0.3, 0.2, 0.1), pieces=8000, kinds=("good", "good", "any")),
}


def draw(count: int, seed: int, choice: Choice, data: Path) -> list[Recipe]:
    """Recipes drawn at random, with their prepared data in `data`. Half of them are likely to learn: a middling rate, a
    warm-up. A quarter are likely to fail: a high rate, often Post-LN. Larger models get fewer updates.

    Raises:
        UserError: a text or a block is unknown.
    """
    chance = random.Random(seed)
    drawn: list[Recipe] = []
    while len(drawn) < count:
        kind = chance.choice(choice.kinds)
        encoder = "post_ln" if kind == "wild" and chance.random() < 0.4 else chance.choice(choice.blocks)
        decoder = chance.choice(choice.blocks) if chance.random() < 0.2 else encoder
        layers = [chance.choice(choice.depths)] * 2
        if chance.random() < 0.3:
            layers[1] = chance.choice(choice.depths)
        budget = chance.choice(choice.updates)
        widths = choice.widths[1:] if kind == "good" else choice.widths
        tokens, width = chance.choice(choice.tokens), chance.choice(widths)
        cost = budget * (sum(layers) + 2) * (0.0012 + tokens * (width + 48) * 3.5e-8)
        if not choice.seconds[0] < cost < choice.seconds[1]:
            continue
        text = chance.choice(choice.texts)
        slower = chance.choice(choice.encoder_rates) if len(choice.encoder_rates) > 1 else 1.0
        drawn.append(recipe_of(text, data, pieces=choice.pieces, seed=chance.randrange(1000), settings={
            "batch": {"tokens": tokens},
            "model": {"width": width, "heads": 4, "ffn": 2 * width, "dropout": chance.choice((0.0, 0.1)),
                      **{side: {"block": block, "layers": count, "init": "auto"}
                         for side, block, count in zip(SIDES, (encoder, decoder), layers, strict=True)}},
            "optimizer": {"name": "adam" if kind == "good" else chance.choice(("adam", "adam", "radam")),
                          "lr": round(10 ** chance.uniform(*_RATES[kind]), 5), "betas": [0.9, 0.98],
                          **({"lr_factors": {"encoder": slower}} if slower < 1 else {})},
            "schedule": {"name": chance.choice(("linear", "inverse_sqrt", "inverse_sqrt", "constant")),
                         "warmup": budget // chance.choice((10, 5, 3) if kind == "good" else (budget + 1, 10, 3))},
            "train": {"updates": budget, "label_smoothing": chance.choice((0.0, 0.1)),
                      "clip": chance.choice((0.0, 1.0))},
        }))
    return drawn


def recipe_of(text: str, data: Path, *, seed: int, settings: Mapping[str, Any], pieces: int = 1000) -> Recipe:
    """The recipe of a run on one of `TEXTS`.

    Raises:
        UserError: the text is unknown, or the settings have a fault.
    """
    if text not in TEXTS:
        raise UserError(f"unknown text {text!r}; known: {', '.join(TEXTS)}")
    pieces = 52 if text == "toy" else pieces  # it has no more
    source, target, train, valid = TEXTS[text]
    root = os.environ.get("DEEPNMT_CORPORA", ".")
    texts = {name: {"src": f"{root}/{files.format(source)}", "trg": f"{root}/{files.format(target)}"}
             for name, files in (("train", train), ("valid", valid))}
    return check_recipe({
        "run": text, "seed": seed, "vocab": {"size": pieces, "shared": True},
        "data": {"folder": str(data / f"{text}_{pieces}"), "src_lang": source, "trg_lang": target, **texts,
                 "workers": 1, "filters": {"max_tokens": 100}},
        "parallel": {"ds_config": None, "threads": 1}, "admin": {"tokens": 1024},
        **settings, "model": {"tied": "all", "max_length": 128, **settings["model"]},
    }, "a run for the verdict")


def write_toy(folder: Path) -> None:
    """The toy task as a text: 20,000 training and 600 validation sentences, a letter for each symbol."""
    folder.mkdir(parents=True, exist_ok=True)
    task = ToyTask()
    for name, first, count in (("train", 0, 200), ("valid", 1000, 6)):
        lines: dict[str, list[str]] = {"de": [], "en": []}
        for number in range(first, first + count):
            batch = task.batch(number, 100)
            source, lengths, target = batch["src"], batch["src_lengths"], batch["trg_out"]
            for language, letters, rows in (("de", "abcdefghijkl", source), ("en", "mnopqrstuvwx", target)):
                lines[language] += [" ".join(letters[symbol - 4] for symbol in row[:length - 1])
                                    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
        for language, own in lines.items():
            (folder / f"{name}.{language}").write_text("\n".join(own) + "\n", encoding="utf-8")


# -- running -----------------------------------------------------------------------------------------------------------


def run_all(recipes: Sequence[Recipe], output: Path, share: tuple[int, int] = (0, 1)) -> int:
    """Trains the recipes that are missing in `output`, appending a line for each; returns how many are left.

    Args:
        share: (k, n): of every n recipes the k-th, from 0, so that n processes can share the work.
    """
    make_parent_folder(output, "RUNS")
    own = recipes[share[0]::share[1]]
    done = _runs_by_recipe(output)
    missing = [recipe for recipe in own if json.dumps(kept(recipe)) not in done]
    left = len(missing)
    for [record] in append_runs(output, ([run_recipe(recipe)] for recipe in missing)):
        left -= 1
        gains = " ".join(f"{mark['shuffled'] - mark['own']:.3f}" if mark["own"] is not None else "not finite"
                         for mark in record["marks"])
        print(f"{record['text']}: {record['marks'][-1]['outcome']}, gain {gains} ({record['seconds']:.0f} s), "
              f"{left} left", flush=True)
    return left


def kept(recipe: Recipe) -> dict[str, Any]:
    """What a line says of its recipe."""
    tree = recipe.model_dump()
    pieces = {} if recipe.vocab.size in (52, 1000) else {"pieces": recipe.vocab.size}  # the others have none
    return {"text": recipe.run, **pieces, **{name: tree[name] for name in _KEPT},
            "train": {name: tree["train"][name] for name in ("updates", "label_smoothing", "clip")}}


def key_of(record: Record) -> str:
    """A key that is equal for equal recipes."""
    return json.dumps(record["recipe"])


def run_recipe(recipe: Recipe) -> Record:
    """Tries, trains and measures one recipe; returns its line."""
    device, started = torch.device("cpu"), time.monotonic()
    data, [model, second] = _begin(recipe, 2)
    ranks = Ranks(0, 1, 0, 1, device)
    trial = run_trial(model, recipe, data, device)
    train, valid = data.split("train"), data.split("valid").truncated(recipe.model.max_length)
    surprise = frequencies(train, second.output_weight.size(0))
    engine, state = LocalEngine(second, recipe, device), TrainState()
    total, losses, marks = recipe.train.updates, [], []
    for done in updates(engine, training_stream(recipe, data), recipe, state, ranks):
        losses.append(done.stats.nll / done.update.tokens)
        if done.give_up or (done.stats.applied and state.update in (total // 4, total // 2, total)):
            measured = measure_outcome(engine.evaluate, valid, rows_of_corpora(data).values(), surprise, device)
            marks.append(mark_of(state.update, measured, done.give_up))
        if done.give_up or state.update == total:
            break
    means = [fmean(losses[start:start + _INTERVAL]) for start in range(0, len(losses), _INTERVAL)]
    return {"text": recipe.run, "recipe": kept(recipe), "trial": finite_only(asdict(trial)), "marks": marks,
            "losses": finite_only(means), "seconds": round(time.monotonic() - started, 1)}


def _begin(recipe: Recipe, count: int = 1) -> tuple[PreparedData, list[Transformer]]:
    """The prepared data and `count` equal models with the run's initial weights."""
    if not (Path(recipe.data.folder) / "manifest.json").exists():
        prepare(recipe)
    data = PreparedData.open(recipe.data.folder)
    source, target = (vocab.size for vocab in data.vocabs())
    profile = profile_for(recipe, data, Ranks.alone())
    return data, [fresh_model(recipe.model, source, target, recipe.seed, [], profile=profile,
                              label_smoothing=recipe.train.label_smoothing) for _ in range(count)]


def _trial_of(recipe: Recipe) -> Trial:
    data, [model] = _begin(recipe)
    return run_trial(model, recipe, data, torch.device("cpu"))


def mark_of(update: int, measured: Measured, gave_up: bool = False) -> dict[str, Any]:
    """A measured outcome, as in a line."""
    return {"update": update, **finite_only(asdict(measured)), "outcome": "stuck" if gave_up else measured.outcome}


def finite_only(value: Any) -> Any:
    """The value with five digits after the point, and None for what is not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite_only(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite_only(each) for each in value]
    return (round(value, 5) if math.isfinite(value) else None) if isinstance(value, float) else value


def read_text_runs(path: Path) -> list[Record]:
    """The runs of a file, see `read_runs`."""
    return read_runs(path, "the verdict's runs", {"text", "recipe", "trial", "marks"}, examples_of, '{"text": ',
                     "give a file of the verdict's runs", "give a file that verdict-runs run wrote")


def _runs_by_recipe(path: Path) -> dict[str, Record]:
    """The runs of a file by the JSON of what is kept of a recipe; settings that a line lacks have their defaults."""
    return {json.dumps(kept(_recipe_again(run, Path(), run["recipe"]["seed"]))): run for run in read_text_runs(path)}


def _recipe_again(run: Record, data: Path, seed: int) -> Recipe:
    """The recipe of a line, with a seed."""
    tree = {name: value for name, value in run["recipe"].items() if name not in ("text", "pieces", "seed")}
    return recipe_of(run["text"], data, pieces=run["recipe"].get("pieces", 1000), seed=seed, settings=tree)


def run_again(file: Path, output: Path, data: Path) -> str:
    """Trains every run of a file with another seed, appending a line for each to `output`; returns a table of how they
    ended. Where a seed decides the outcome, no verdict on the recipe can foresee it."""
    firsts = read_text_runs(file)
    recipes = [_recipe_again(run, data, run["recipe"]["seed"] + _ANOTHER_SEED) for run in firsts]
    run_all(recipes, output)
    seconds = _runs_by_recipe(output)
    pairs = Counter((first["marks"][-1]["outcome"], seconds[json.dumps(kept(recipe))]["marks"][-1]["outcome"])
                    for first, recipe in zip(firsts, recipes, strict=True))
    same = sum(count for (first, second), count in pairs.items() if first == second)
    rows = [["ended", *(f"with another seed: {name}" for name in OUTCOMES)]]
    rows += [[first, *(str(pairs[first, second]) for second in OUTCOMES)] for first in OUTCOMES]
    return f"{same} of {len(firsts)} ended as before, {100 * same / len(firsts):.1f} %\n{markdown_table(rows)}"


# -- proposals ---------------------------------------------------------------------------------------------------------


def propose_all(failed: Path, output: Path, count: int, seed: int, data: Path) -> str:
    """Draws runs that failed, tries the doctor's alternatives on each, and trains the one that it rates highest.

    Appends a line for each to `output`, and returns a table of all lines. Drawn are runs of at least 100 updates and at
    most 6 layers a side. More updates are no proposal here.

    Raises:
        UserError: there are too few such runs.
    """
    rule = VerdictRule.load(SHIPPED)
    runs = [record for record in read_text_runs(failed) if record["marks"][-1]["outcome"] != "translates"
            and record["recipe"]["train"]["updates"] >= 100
            and max(record["recipe"]["model"][side]["layers"] for side in SIDES) <= 6]
    if len(runs) < count:
        raise UserError(f"{failed} has {len(runs)} runs that failed, of 100 updates and 6 layers a side; set --count "
                        f"to {len(runs)} or less")
    make_parent_folder(output, "RUNS")
    done = {json.dumps(record["of"]) for record in read_text_runs(output)}
    missing = [run for run in random.Random(seed).sample(runs, count) if key_of(run) not in done]
    for [line] in append_runs(output, ([_proposal(run, rule, data)] for run in missing)):
        print(f"{line['text']}: {line['was']}, with {line['proposal']} {line['marks'][-1]['outcome']}", flush=True)
    rows = [["it was", "proposal", "predicted", "came", "validation loss"]]
    rows += [[line["was"], line["proposal"], max(OUTCOMES, key=line["said"].__getitem__), line["marks"][-1]["outcome"],
              f"{line['loss']} to {line['marks'][-1]['own']}"] for line in read_text_runs(output)]
    return markdown_table(rows)


def _proposal(run: Record, rule: VerdictRule, data: Path) -> Record:
    """The line of a run's best alternative, with the run's recipe, outcome and loss, and what the rule said."""
    tried = alternatives(_recipe_again(run, data, run["recipe"]["seed"]))
    rated = {name: rule.probabilities(features(_trial_of(other), other, other.train.updates))
             for name, other in tried.items()}
    best = max(rated, key=lambda name: expected_rank(rated[name]))
    return {**run_recipe(tried[best]), "of": run["recipe"], "was": run["marks"][-1]["outcome"],
            "loss": run["marks"][-1]["own"], "proposal": best, "said": rated[best], "rated": rated}


# -- fitting and judging -----------------------------------------------------------------------------------------------


def examples_of(record: Record) -> list[Example]:
    """The examples of a run, one for each measured outcome."""
    tree = {name: value for name, value in record["recipe"].items() if name not in ("text", "pieces")}
    plain = recipe_of("toy", Path(), seed=0, settings=tree)
    trial = Trial(**{name: _number(value) for name, value in record["trial"].items()})
    layers = {side: tree["model"][side]["layers"] for side in SIDES}
    groups = {"text": record["text"], "depth": depth_group(sum(layers.values())),
              "block": "/".join(dict.fromkeys(tree["model"][side]["block"] for side in SIDES))}
    marks = [mark for mark in record["marks"] if mark["update"] > TRIAL] or record["marks"][-1:]
    weight = (1.0 if trial.source else OLD) / len(marks)
    return [Example(features(trial, plain, mark["update"]), mark["outcome"], weight, groups, mark is marks[-1])
            for mark in marks]


def depth_group(layers: int) -> str:
    """The group of a depth, layers of both stacks together."""
    return next(f"up to {most}" for most in (4, 6, 8, 12, 24, 1000) if layers <= most)


def _number(value: Any) -> Any:
    """The value as before `finite_only`."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, dict):
        return {name: _number(each) for name, each in value.items()}
    return math.nan if value is None else value


def fit_runs(file: Path, ship: bool) -> str:
    """Fits the rule on all runs of a file and writes it next to it as `verdict.json`; returns what it is worth.

    Args:
        ship: also replaces deepnmt's own rule.

    Raises:
        UserError: there are too few runs, or the rule cannot be written.
    """
    records = read_text_runs(file)
    examples = [example for record in records for example in examples_of(record)]
    if len(records) < 40 or {example.outcome for example in examples} != set(OUTCOMES):
        raise UserError(f"{file} has {len(records)} runs; a rule needs 40 or more, with every outcome among them")
    plain = {kind: crossed(examples, kind, fit) for kind in kinds_of(examples)}
    power = choose([*plain.values()])
    held = {kind: raised(tested, power) for kind, tested in plain.items()}
    ended = [record["marks"][-1]["outcome"] for record in records]
    rule = replace(fit(examples, power), facts={
        "runs": len(records), "examples": len(examples),
        "outcomes": {name: ended.count(name) for name in OUTCOMES},
        "held_out": {kind: round(tested.accuracy, 4) for kind, tested in held.items()},
        "held_out_calibration_error": {kind: round(tested.calibration_error, 4) for kind, tested in held.items()},
        "seen": seen_in(records), "fitted_on": sorted(map(key_hash, records))})
    rule.save(file.with_name("verdict.json"))
    if ship:
        rule.save(SHIPPED)
    return "\n".join([f"{len(records)} runs, {len(examples)} measured outcomes, power {power}",
                      *(f"held out by {kind}: {report(tested)}\n{markdown_table(tested.table())}"
                        for kind, tested in held.items())])


def learn_runs(file: Path) -> str:
    """How right the rule becomes as it learns from more runs, tenfold, of those whose use of the source was measured: a
    table; and how right the last row is on runs that end near the mark between two outcomes.

    Raises:
        UserError: there are too few such runs.
    """
    records = read_text_runs(file)
    measured = [record for record in records if record["trial"].get("source")]
    if len(measured) < 40:
        raise UserError(f"{file} has {len(measured)} runs in which the use of the source was measured; a learning "
                        "curve needs 40 or more, see studies/verdict_runs.jsonl")
    others = [example for record in records if not record["trial"].get("source") for example in examples_of(record)]
    most = len(measured) - math.ceil(len(measured) / FOLDS)
    counts = [most * quarter // 4 for quarter in range(0 if others else 1, 5)]  # of no run there is nothing to learn
    tests = learning_curve([examples_of(record) for record in measured], others, counts)
    rows = [["runs learnt from", "right", "log loss"]]
    for count, drawn in zip(counts, tests, strict=True):
        right, loss = (fmean(getattr(tested, name) for tested in drawn) for name in ("accuracy", "log_loss"))
        rows.append([str(count), f"{100 * right:.1f} %", f"{loss:.3f}"])
    lines = [markdown_table(rows), ""]
    ends = [record["marks"][-1] for record in measured]
    near = [None not in (end["own"], end["shuffled"]) and _NEAR[0] < end["shuffled"] - end["own"] < _NEAR[1]
            for end in ends]
    for word, inside in (("between", True), ("not between", False)):
        parts = [Judged([pair for pair, this in zip(tested.pairs, near, strict=True) if this == inside])
                 for tested in tests[-1]]
        if parts[0].pairs:
            lines.append(f"right, of the {len(parts[0].pairs)} that end with a gain {word} {_NEAR[0]} and {_NEAR[1]} "
                         f"nats: {100 * fmean(part.accuracy for part in parts):.1f} %")
    return "\n".join(lines)


def seen_in(records: Sequence[Record]) -> dict[str, Any]:
    """What the runs had, for `VerdictRule.unseen`."""
    stacks = [record["recipe"]["model"][side] for record in records for side in SIDES]

    def values(setting: str) -> list[Any]:
        found = {json.dumps(value): value for value in (_value_in(record["recipe"], setting) for record in records)}
        return [found[text] for text in sorted(found)]

    return {"blocks": sorted({stack["block"] for stack in stacks}),
            "inits": {block: sorted({initialisation(block, stack["init"]) for stack in stacks
                                     if stack["block"] == block}) for block in BLOCKS
                      if any(stack["block"] == block for stack in stacks)},
            **{setting: values(setting) for setting in Recipe.marked(Fact.SEEN)},
            "width": sorted(values("model.width")),
            "texts": sorted({record["text"] for record in records}), "precisions": ["fp32"]}


def _value_in(tree: Mapping[str, Any], setting: str) -> Any:
    """A setting of a run's record; those that it lacks had their default."""
    for name in setting.split("."):
        if name not in tree:
            return Recipe.default(setting)
        tree = tree[name]
    return tree


def key_hash(record: Record) -> str:
    """A short hash of a run's recipe."""
    return hashlib.sha256(key_of(record).encode()).hexdigest()[:12]


def judge_runs(file: Path, rule_file: Path | None = None, ship: bool = False) -> str:
    """Tests a finished rule (None: deepnmt's own) on runs at their end that it was not fitted on; draws a picture of
    its reliability next to the file.

    Args:
        ship: also notes in deepnmt's own rule how right it was, for the doctor's page.

    Raises:
        UserError: there are no such runs, or the rule is missing or another than that to be noted in.
    """
    if ship and rule_file is not None:
        raise UserError(f"--ship notes what deepnmt's own rule was right on, but --rule is {rule_file}; leave one out")
    rule = VerdictRule.load(rule_file or SHIPPED)
    fitted = set(rule.facts.get("fitted_on", []))
    records = [record for record in read_text_runs(file) if key_hash(record) not in fitted]
    if not records:
        raise UserError(f"{file} has no runs that the rule was not fitted on; make others with python -m studies "
                        "verdict-runs run, for example with --seed 2")
    ends = [example for record in records for example in examples_of(record) if example.last]

    def tested(some: Sequence[Example]) -> Judged:
        return Judged([(rule.probabilities(example.values), example.outcome) for example in some])

    whole = tested(ends)
    plot_reliability([(max(said.values()), max(OUTCOMES, key=said.__getitem__) == came) for said, came in whole.pairs],
                     file.with_suffix(".png"), BINS)
    sure = Judged([(said, came) for said, came in whole.pairs if max(said.values()) >= SURE])
    if ship:
        replace(rule, facts={**rule.facts, "fresh": {
            "runs": len(ends), "right": round(whole.accuracy, 4), "sure": len(sure.pairs),
            "sure_right": round(sure.accuracy, 4)}}).save(SHIPPED)
    lines = [str(report(whole)), f"where it is sure, from {SURE} on: {100 * sure.accuracy:.0f} % of {len(sure.pairs)}",
             markdown_table(whole.table())]
    for kind in KINDS:
        for group in sorted({example.groups[kind] for example in ends}):
            own = [example for example in ends if example.groups[kind] == group]
            lines.append(f"{kind} {group}: {100 * tested(own).accuracy:.0f} % of {len(own)}")
    return "\n".join(lines)
