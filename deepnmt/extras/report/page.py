"""The report: one HTML page about the scores and translations of a run, or of two runs beside each other."""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import sacrebleu

from deepnmt.config import Recipe
from deepnmt.config.choices import METRICS
from deepnmt.data.text import count_pairs, read_lines, read_pairs
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import system_names, text_name, texts_folder
from deepnmt.evaluate.metrics import EvaluationSet, compare, digits_of, line_of, score_lines
from deepnmt.files import atomic_write, make_parent_folder, read_log, reporting
from deepnmt.pages import html_table, page, plotted
from deepnmt.plots import GREY, panels, plot_learning_curve, save, style
from deepnmt.progress import show_progress

SHOWN = 10  # sentences of each kind
_MARKS = "Words that the reference does not have there are marked; words that are missing are not."
LENGTHS = (1, 11, 21, 31, 51)  # words of a source at which a group begins
SOURCE_USE = {  # names in log.jsonl
    "source_gain": "what the source is worth, nats a target token",
    "encoder_common": "one vector's share of the encoder's output",
    "decoder_common": "one vector's share of the decoder's output",
    "cross_attention_entropy": "entropy of cross-attention, share of the largest",
}
FREQUENCIES = (0, 1, 10, 100, 1000)  # occurrences in the training text at which a group begins


@dataclass(frozen=True)
class Evaluated:
    """A run that was evaluated: its recipe, the scores in its file, and its translations of every test set."""

    recipe: Recipe
    scores: dict[str, Any]
    sets: dict[str, EvaluationSet]
    translations: dict[str, list[str]]

    @cached_property
    def chrf(self) -> dict[str, list[float]]:
        """The chrF of every sentence of each test set."""
        metric = sacrebleu.CHRF()
        scores: dict[str, list[float]] = {}
        for name, test in self.sets.items():
            scores[name] = []
            for line, *references in zip(self.translations[name], *test.references, strict=True):
                scores[name].append(metric.sentence_score(line, list(references)).score)
        return scores


def write_report(recipes: Sequence[Recipe], scores: str, output: Path) -> Path:
    """Writes the page about one run, or two, whose recipes are given, and returns its path.

    Args:
        scores: the name of their files of scores.

    Raises:
        UserError: a run was not evaluated, or has no texts; two have no test set in common; the page cannot be written.
    """
    runs = [_read(recipe, Path(recipe.run) / scores) for recipe in recipes]
    first, *others = runs
    folders = [recipe.run for recipe in recipes]
    make_parent_folder(output)
    names = list(first.sets)
    for other in others:
        names = [name for name in names if other.sets.get(name) == first.sets[name]]
    if not names:
        raise UserError(f"{' and '.join(folders)} were scored on no test set in common; evaluate both on the same")
    labels = system_names(folders)
    parts = [f"<h1>{escape(' and '.join(labels))}</h1>", _facts(runs, labels), *_curves(runs, labels)]
    parts += ["<h2>Scores</h2>", *_scores(runs, labels, names)]
    counts = _training_words(first, names)
    for name in names:
        parts.append(f"<h2>Test set {escape(name)}</h2>")
        parts += [_by_length(runs, labels, name), _by_frequency(runs, labels, name, counts)]
        if others:
            parts += _differences(runs, labels, name)
        else:
            parts += _best_and_worst(first, name)
    with reporting(f"file {output}", "set --output to a file that can be"), atomic_write(output) as stream:
        stream.write(page(f"Report: {' and '.join(labels)}", parts))
    return output


def _read(recipe: Recipe, file: Path) -> Evaluated:
    try:
        scores = json.loads(file.read_bytes())
        names = list(scores["sets"])
    except OSError:
        raise UserError(f"there is no file {file}; run deepnmt evaluate {recipe.run} first, or name another "
                        "file of its scores with --scores") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{file} does not hold the scores of one system; give the runs' own, as deepnmt evaluate RUN "
                        "writes them") from None
    sets, translations, folder = {}, {}, texts_folder(file)
    for name in names:
        stem = folder / text_name(name)
        if not Path(f"{stem}.hyp").is_file():
            raise UserError(f"{folder} does not hold the texts of test set {name}; run deepnmt evaluate {recipe.run} "
                            "again, which keeps them")
        files = [Path(f"{stem}.ref"), *sorted(folder.glob(f"{text_name(name)}.ref?"))]
        references = [list(read_lines(file)) for file in files]
        lang = recipe.data.trg_lang
        test = recipe.data.test.get(name)
        if test and test.trg_lang:
            lang = test.trg_lang
        sets[name] = EvaluationSet(name, list(read_lines(Path(f"{stem}.src"))), references, lang)
        translations[name] = list(read_lines(Path(f"{stem}.hyp")))
        lines, sources = len(translations[name]), len(sets[name].sources)
        if lines != sources:
            raise UserError(f"{stem}.hyp has {lines} lines, but {stem}.src {sources}; run deepnmt evaluate "
                            f"{recipe.run} again")
    return Evaluated(recipe, scores, sets, translations)


# -- sections ----------------------------------------------------------------------------------------------------------


def _facts(runs: Sequence[Evaluated], labels: Sequence[str]) -> str:
    columns = []
    for run in runs:
        model, scores = run.recipe.model, run.scores
        blocks = model.block_names
        facts = {
            "languages": f"{run.recipe.data.src_lang} to {run.recipe.data.trg_lang}",
            "model": f"{blocks[0]} {model.encoder.layers}L, {blocks[1]} {model.decoder.layers}L, width {model.width}",
        }
        if "checkpoint" in scores:  # none if ready translations were scored
            search = scores["translate"]
            facts["checkpoint"] = f"{scores['checkpoint']}, update {scores['update']:,}"
            updates = [f"{update:,}" for update in scores["averaged_updates"]]
            if "ensemble" in scores:
                facts["in an ensemble with"] = ", ".join(scores["ensemble"])
            facts["averaged updates"] = ", ".join(updates) or "none"
            facts["search"] = f"{search['method']}, beam {search['beam']}, length penalty {search['length_penalty']}"
        columns.append(facts)
    rows = [["", *labels]]
    for fact in max(columns, key=len):
        row = [fact]
        for column in columns:
            row.append(column.get(fact, "not told"))
        rows.append(row)
    return html_table(rows, numbers=False)


def _curves(runs: Sequence[Evaluated], labels: Sequence[str]) -> list[str]:
    parts = ["<h2>Learning</h2>"]
    for run, label in zip(runs, labels, strict=True):
        log = Path(run.recipe.run) / "log.jsonl"
        if log.is_file():
            records = read_log(log)
            parts.append(plotted(partial(plot_learning_curve, records, run=label), f"Learning curve of {label}"))
            parts += _source_use(records, label)
        else:
            parts.append(f"<p>{escape(label)} has no log.jsonl.</p>")
    return parts


def _source_use(records: Sequence[dict[str, Any]], label: str) -> list[str]:
    """A table of how the source was used at the last validation; nothing for a run that did not measure it."""
    last = None
    for record in records:
        if record["type"] == "valid" and SOURCE_USE.keys() <= record.keys():
            last = record
    if last is None:
        return []
    rows = [[f"{label}, validation at update {last['update']:,}", ""]]
    for name, words in SOURCE_USE.items():
        rows.append([words, f"{float(last[name]):.3f}"])
    return [html_table(rows)]


def _scores(runs: Sequence[Evaluated], labels: Sequence[str], names: Sequence[str]) -> list[str]:
    parts = []
    known = runs[0].scores["sets"][names[0]]
    metrics = [*METRICS, *(name for name in known if name not in METRICS and f"{name}_signature" in known)]
    for run in runs:
        metrics = [metric for metric in metrics if metric in run.scores["sets"][names[0]]]
    for metric in metrics:
        line = line_of(metric)
        head = line
        facts = METRICS[metric] if metric in METRICS else runs[0].recipe.metrics.get(metric)
        if facts and facts.lower_is_better:
            head += " (lower is better)"
        rows = [[head, *names]]
        signatures = []  # different ones
        for run, label in zip(runs, labels, strict=True):
            row = [label]
            for name in names:
                scores = run.scores["sets"][name]
                row.append(f"{scores[metric]:.{digits_of(metric)}f}")
                signature = f"<p><small>{escape(line)}|{escape(scores[f'{metric}_signature'])}</small></p>"
                if signature not in signatures:
                    signatures.append(signature)
            rows.append(row)
        parts += [html_table(rows), *signatures]
    if len(runs) > 1:
        parts += _compared(runs, labels, names, [metric for metric in metrics if metric in METRICS])
    return parts


def _compared(runs: Sequence[Evaluated], labels: Sequence[str], names: Sequence[str], metrics: Sequence[str]
              ) -> list[str]:
    rows = [["", "difference", "p", "SacreBLEU's p"]]
    steps = list(itertools.product(names, metrics))
    line = f"comparing: {{:,}} of {len(steps)} test sets and metrics"
    with show_progress(line, total=len(steps), desc="comparing", leave=False) as progress:
        for done, (name, metric) in enumerate(steps, start=1):
            systems = {label: run.translations[name] for run, label in zip(runs, labels, strict=True)}
            test = runs[0].sets[name]
            [comparison] = compare(systems, test, test.lang or "", [metric])
            rows.append([f"{name}, {METRICS[metric].line}", f"{comparison.difference:+.2f}",
                         f"{comparison.p_value:.4f}", f"{comparison.sacrebleu_p_value:.4f}"])
            progress(done)
    return [f"<h3>{escape(labels[1])} against {escape(labels[0])}</h3><p>p, by approximate randomization, is "
            "the probability of a difference as large, in either direction, between equal systems. "
            "SacreBLEU's p is what its paired bootstrap prints; it is below 0.05 for more than a tenth of "
            "equal systems.</p>", html_table(rows)]


def _by_length(runs: Sequence[Evaluated], labels: Sequence[str], name: str) -> str:
    test = runs[0].sets[name]
    groups: dict[int, list[int]] = {}
    for i, source in enumerate(test.sources):
        groups.setdefault(group_of(len(source.split()), LENGTHS), []).append(i)
    head = ["words of the source", "sentences"]
    for label in labels:
        head += [f"BLEU, {label}", f"chrF2, {label}"]
    rows = [head]
    for number in sorted(groups):
        lines = groups[number]
        references = []
        for reference in test.references:
            references.append([reference[i] for i in lines])
        row = [group_words(number, LENGTHS), f"{len(lines):,}"]
        for run in runs:
            translations = [run.translations[name][i] for i in lines]
            values = score_lines(translations, references, test.lang or "", metrics=("bleu", "chrf")).values
            row += [f"{values['bleu']:.1f}", f"{values['chrf']:.1f}"]
        rows.append(row)
    return "<h3>By length</h3>" + html_table(rows)


def _by_frequency(runs: Sequence[Evaluated], labels: Sequence[str], name: str, counts: Counter[str] | None) -> str:
    text = "training text"
    if len(runs) > 1:
        text += f" of {labels[0]}"  # that of the other may be another
    if counts is None:
        return (f"<h3>By frequency of words</h3><p>The {escape(text)} is not there any more, so nothing is "
                "known.</p>")
    head = [f"times in the {text}", "words of the reference"]
    head += [f"translated, {label}" for label in labels]
    rows = [head]
    total = Counter[int]()
    matches = [Counter[int]() for _ in runs]
    for i, reference in enumerate(runs[0].sets[name].references[0]):
        wanted = Counter(_split(reference))
        for word, count in wanted.items():
            total[group_of(counts[word], FREQUENCIES)] += count
        for run, hits in zip(runs, matches, strict=True):
            both = wanted & Counter(_split(run.translations[name][i]))
            for word, count in both.items():
                hits[group_of(counts[word], FREQUENCIES)] += count
    for number in sorted(total):
        row = [group_words(number, FREQUENCIES), f"{total[number]:,}"]
        for hits in matches:
            row.append(f"{100 * hits[number] / total[number]:.1f} %")
        rows.append(row)
    return ("<h3>By frequency of words</h3><p>The share of the reference's words that the translation of the same "
            f"sentence contains, by how often they come in the {escape(text)}.</p>") + html_table(rows)


def _best_and_worst(run: Evaluated, name: str) -> list[str]:
    chrf = run.chrf[name]
    order = sorted(range(len(chrf)), key=lambda i: (-chrf[i], i))
    some = min(SHOWN, (len(order) + 1) // 2)
    parts = []
    for kind, chosen in (("best", order[:some]), ("worst", order[::-1][:some])):
        parts.append(f"<h3>The {some} {kind} sentences</h3><p>By chrF2, which is in brackets. {_MARKS}</p>"
                     f"{_sentences([run], ['translation'], name, chosen)}")
    return parts


def _differences(runs: Sequence[Evaluated], labels: Sequence[str], name: str) -> list[str]:
    one, other = runs
    gains = [theirs - ours for ours, theirs in zip(one.chrf[name], other.chrf[name], strict=True)]
    order = sorted(range(len(gains)), key=lambda i: (-gains[i], i))
    better = [i for i in order if gains[i] > 0]
    worse = [i for i in order[::-1] if gains[i] < 0]
    same = 0
    for text, rival in zip(one.translations[name], other.translations[name], strict=True):
        if text == rival:
            same += 1
    title = f"chrF2 of every sentence, {labels[1]} less {labels[0]}"
    parts = [f"<h3>Differences</h3><p>{escape(labels[1])} is better in {len(better):,} sentences of {len(gains):,}, "
             f"worse in {len(worse):,}; {same:,} translations are the same.</p>",
             plotted(partial(_plot_gains, gains, title), title)]
    for kind, chosen in (("better", better), ("worse", worse)):
        if chosen:
            some = chosen[:SHOWN]
            parts.append(f"<h3>Where {escape(labels[1])} is {kind} by most</h3><p>The chrF2 of a sentence is in "
                         f"brackets. {_MARKS}</p>"
                         f"{_sentences(runs, labels, name, some)}")
    return parts


def _plot_gains(gains: Sequence[float], title: str, file: Path) -> None:
    """A histogram of the sentences' differences."""
    figure, [axes] = panels([title], "difference of chrF2, points", "sentences")
    axes.hist(gains, bins=[10 * edge for edge in range(-10, 11)], color=style(0)["color"], rwidth=0.9)
    axes.axvline(0, color=GREY, linewidth=1)
    save(figure, file)


# -- words and sentences -----------------------------------------------------------------------------------------------


def _sentences(runs: Sequence[Evaluated], labels: Sequence[str], name: str, chosen: Sequence[int]) -> str:
    rows = []
    for i in chosen:
        test = runs[0].sets[name]
        reference = test.references[0][i]
        lines = [(f"source {i + 1:,}", escape(test.sources[i])), ("reference", escape(reference))]
        for run, label in zip(runs, labels, strict=True):
            lines.append((f"{label} ({run.chrf[name][i]:.0f})", marked(run.translations[name][i], reference)))
        row = "<tr class=first>"
        for label, text in lines:
            rows.append(f"{row}<td class='label'>{escape(label)}</td><td>{text}</td></tr>")
            row = "<tr>"
    return f"<table class='sentences'>{''.join(rows)}</table>"


def marked(text: str, reference: str) -> str:
    """The text as HTML, with marks on words that are not the reference's."""
    wanted, _ = _words_and_spaces(reference)
    words, ends = _words_and_spaces(text)
    parts = []
    for kind, _, _, start, stop in SequenceMatcher(None, wanted, words, autojunk=False).get_opcodes():
        if start == stop:
            continue
        part = ""
        for word, end in zip(words[start:stop], ends[start:stop]):
            part += escape(word + end)
        parts.append(part if kind == "equal" else f"<mark>{part.rstrip()}</mark>{ends[stop - 1]}")
    return "".join(parts).strip() or "<small>nothing</small>"


def _words_and_spaces(text: str) -> tuple[list[str], list[str]]:
    """The words and marks of a text, and what space follows each."""
    words, spaces = [], []
    for word, space in re.findall(r"(\w+|[^\w\s])(\s*)", text):
        words.append(word)
        spaces.append(space)
    return words, spaces


def _split(text: str) -> list[str]:
    """The words of a text, without punctuation."""
    return re.findall(r"\w+", text)


def _training_words(run: Evaluated, names: Sequence[str]) -> Counter[str] | None:
    """How often the words of these test sets' references come in the target side of the training text; None if that
    cannot be read."""
    words: set[str] = set()
    for name in names:
        for reference in run.sets[name].references[0]:
            words.update(_split(reference))
    counts: Counter[str] = Counter()
    train = run.recipe.data.train
    try:
        total = count_pairs(train)
        line = f"counting words: {{:,}} of {total:,} pairs" if total else "counting words: {:,} pairs"
        with show_progress(line, total=total, desc="counting words", unit=" pairs", leave=False) as progress:
            for done, (_, target) in enumerate(read_pairs(train), start=1):
                counts.update(word for word in _split(target) if word in words)
                progress(done)
    except UserError:
        return None
    return counts


def group_of(value: int, begins: Sequence[int]) -> int:
    """The last group that begins at or below a value; the first one takes what is below all."""
    return max(0, bisect_right(begins, value) - 1)


def group_words(number: int, begins: Sequence[int]) -> str:
    """The values of a group, in words."""
    if number + 1 == len(begins):
        return f"{begins[number]:,} or more"
    last = begins[number + 1] - 1
    return f"{begins[number]:,} to {last:,}" if last > begins[number] else f"{last:,}"
