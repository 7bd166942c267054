"""What the runs of a block study came to, as tables and curves.

The outcome follows from the validation loss, which is compared with three baselines in nats a target token: guessing
evenly among the tokens, log V; the tokens' frequencies; and a model of the same recipe trained without sources. To test
whether a model uses its sources, it is validated again with shuffled sources: every sentence gets the source of another
one of similar length, and the loss must rise. The outcome of a run:

    diverged     non-finite updates ended it, or it is worse than an even guess among the tokens
    stuck        no better than the tokens' frequencies, within 0.1 nats (`MARGIN`)
    target only  better, but no better than `pre_ln` of the same depth and recipe trained without sources, or not
                 worse by 0.1 nats with shuffled sources
    learned      better than that baseline, and worse by more than 0.1 nats with shuffled sources
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from deepnmt.evaluate.significance import Difference
from deepnmt.extras.doctor.outcome import MARGIN
from deepnmt.files import markdown_table
from studies.plots import Panel
from studies.runs import Record
from studies.scores import bleu, difference_of_runs, surprising, unpack, with_totals
from studies.variants import REFERENCE, Variant

TRIALS = 1000  # of a test, for each pair of runs
INTERVAL = 10  # updates per point of a curve: their mean loss


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


def loss_of(record: Record) -> float:
    """The validation loss, infinite if the run diverged."""
    return record["valid"] if record["ended"] and record["valid"] is not None else math.inf


def worth_of(record: Record) -> float:
    """What the source is worth: how much the validation loss rises with another sentence's source, in nats a target
    token; minus infinity if the run diverged."""
    if record["exchanged"] is None or not math.isfinite(loss_of(record)):
        return -math.inf
    return float(record["exchanged"] - record["valid"])


class _Group(NamedTuple):
    """The runs of one depth and warm-up, those of all seeds by name, and what they came to."""

    title: str
    runs: dict[str, list[Record]]
    outcomes: dict[str, str]


def _groups(records: Iterable[Record]) -> list[_Group]:
    """Groups of runs; the titles name the warm-up if there are several."""
    runs: dict[tuple[int, int], dict[str, list[Record]]] = {}
    for record in records:
        variant = Variant(**record["system"])
        runs.setdefault((variant.layers, variant.warmup), {}).setdefault(variant.name, []).append(record)
    several = len({warmup for _, warmup in runs}) > 1
    groups = []
    for (layers, warmup), group in runs.items():
        warm = f", warm-up {warmup}" if warmup else ", no warm-up"
        target_only = next((run["valid"] for [run, *_] in group.values() if not run["system"]["source"]), None)
        outcomes = {}
        for name, seeds in group.items():
            counted = Counter(outcome(run, target_only) for run in seeds)
            outcomes[name] = ", ".join(word if len(counted) == 1 else f"{count} {word}"
                                       for word, count in counted.items())
        groups.append(_Group(f"{layers}L-{layers}L{warm if several else ''}", group, outcomes))
    return groups


def table(records: Sequence[Record]) -> str:
    """A Markdown table for each depth and warm-up, sorted by the mean validation loss, and what its words mean."""
    if not records:
        return "No run is finished yet."
    parts = [f"**{group.title}**\n\n{_group_table(group)}" for group in _groups(records)]
    run = records[0]
    frequencies, even, seeds = run["frequencies"], run["even"], len({each["system"]["seed"] for each in records})
    notes = (f"Plain loss of the validation text after {run['system']['updates']:,} updates, nats a target token; "
             f"shuffled: how much it rises with another sentence's source. An even guess has {even:.3f}, the tokens' "
             f"frequencies {frequencies:.3f}. diverged: not finite, or worse than an even guess; stuck: above "
             f"{frequencies - MARGIN:.3f}; target only: not below {REFERENCE} without sources, or not more than "
             f"{MARGIN} higher with shuffled sources; learned: both.")
    if seeds > 1:
        notes += f" Mean ± standard deviation of up to {seeds} seeds."
    if any(each.get("tests") for each in records):
        notes += (" Test sets: BLEU, and the difference from the first block that was named, with p by approximate "
                  "randomization of sentences, seeds' variance added; * where it stands for all rows together (p < "
                  "0.05, Holm).")
    return "\n\n".join([*parts, notes])


def _group_table(group: _Group) -> str:
    tests = list(dict.fromkeys(name for runs in group.runs.values() for run in runs for name in run.get("tests", {})))
    against = {name: _differences(group, name) for name in tests}
    head = ["block", "initialisation", "parameters", "rate", "runs", "validation", "shuffled", "outcome"]
    for name in tests:
        head += [f"{name}", "difference"]
    rows = [[*head, "target tokens", "CPU hours"]]
    for name, runs in sorted(group.runs.items(), key=lambda item: fmean(map(loss_of, item[1]))):
        variant = Variant(**runs[0]["system"])
        costs = [run["exchanged"] - run["valid"] for run in runs if None not in (run["exchanged"], run["valid"])]
        row = [variant.word, variant.initialisation, f"{runs[0]['parameters']:,}", f"{variant.rate:g}", f"{len(runs)}",
               _mean([run["valid"] for run in runs], 3), f"{fmean(costs):+.2f}" if costs else "–", group.outcomes[name]]
        for test in tests:
            found = against[test].get(name)
            scores = [run["tests"][test]["bleu"] for run in runs if test in run.get("tests", {})]
            some = f" ({len(scores)} of {len(runs)})" if 0 < len(scores) < len(runs) else ""  # others diverged
            row += [_mean(scores, 1) + some,
                    "–" if found is None else f"{found[0].value:+.1f} (p {found[0].p:.3f}){'*' if found[1] else ''}"]
        if all("cpu_seconds" in run for run in runs):
            hours = sum(run["cpu_seconds"] for run in runs) / 3600
            row += [f"{fmean(run['tokens'] for run in runs):,.0f}", f"{hours:.2f}"]
        else:
            row += ["–", "–"]
        rows.append(row)
    return markdown_table(rows)


def _differences(group: _Group, test: str) -> dict[str, tuple[Difference, bool]]:
    """For each block but the first: its difference from it on a test set, and whether it stands for all together."""
    counts = {name: [with_totals(unpack(run["tests"][test]["counts"])) for run in runs if test in run.get("tests", {})]
              for name, runs in group.runs.items()}
    first = next((name for name, runs in group.runs.items() if runs[0]["system"]["source"]), "")
    if not counts.get(first):
        return {}
    others = [name for name, runs in counts.items() if runs and name != first]
    found = [difference_of_runs(counts[name], counts[first], bleu, TRIALS) for name in others]
    return dict(zip(others, zip(found, surprising([each.p for each in found]), strict=True), strict=True))


def search_table(records: Sequence[Record]) -> str:
    """A Markdown table of what the source is worth and of the validation loss by learning rate, the best in bold."""
    tried: dict[tuple[str, str], dict[float, Record]] = {}
    for record in records:
        variant = Variant(**record["system"])
        key = variant.name, f"{variant.layers}L-{variant.layers}L, warm-up {variant.warmup}"
        tried.setdefault(key, {})[variant.rate] = record
    rates = sorted({rate for runs in tried.values() for rate in runs})
    rows = [["block", "model", *(f"{rate:g}" for rate in rates)]]
    for (name, model), runs in tried.items():
        best = max(runs, key=lambda rate: worth_of(runs[rate]))
        cells = dict.fromkeys(rates, "–")
        for rate, run in runs.items():
            cells[rate] = f"{worth_of(run):+.2f} ({text_of(loss_of(run))})"
        cells[best] = f"**{cells[best]}**"
        rows.append([name, model, *cells.values()])
    hours = sum(record["cpu_seconds"] for record in records) / 3600
    return (f"{markdown_table(rows)}\n\nThe search: what the source is worth after "
            f"{records[0]['system']['updates']:,} updates by peak learning rate, in nats (validation loss in "
            f"brackets), the best in bold; {hours:.2f} CPU hours.")


def _mean(values: Sequence[float | None], digits: int) -> str:
    """The mean with the standard deviation, if there are several values."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "not finite" if values else "–"
    mean = text_of(fmean(numbers)) if digits == 3 else f"{fmean(numbers):.{digits}f}"
    return f"{mean} ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def text_of(loss: float | None) -> str:
    """A loss in three digits or fewer."""
    if loss is None or not math.isfinite(loss):
        return "not finite"
    return f"{loss:.3f}" if loss < 100 else f"{loss:.3g}"


def panels(records: Sequence[Record]) -> list[Panel]:
    """The curves, means over the seeds, with a panel for each depth, warm-up and initialisation."""
    made = []
    for title, named, outcomes in _groups(records):
        for init in dict.fromkeys(runs[0]["system"]["init"] for runs in named.values()):
            chosen = {Variant(**runs[0]["system"]).word: (runs, outcomes[name]) for name, runs in named.items()
                      if runs[0]["system"]["init"] == init}
            curves = {word: _curve(runs) for word, (runs, _) in chosen.items()}
            first = next(iter(chosen.values()))[0][0]
            made.append(Panel(title if init == "auto" else f"{title}, init: {init}", curves,
                              {word: result for word, (_, result) in chosen.items()},
                              {"even guess": first["even"], "frequencies": first["frequencies"]}))
    return made


def _curve(runs: Sequence[Record]) -> list[tuple[int, float]]:
    """The mean losses of an interval's updates, dropped ones among them, by the last of these."""
    end = min(run["system"]["updates"] + run.get("dropped", 0) for run in runs)
    curve = []
    for number, losses in enumerate(zip(*(run["losses"] for run in runs), strict=False), 1):
        if None not in losses:
            curve.append((min(INTERVAL * number, end), fmean(losses)))
    return curve
