"""SacreBLEU scores and those of `ratios.py`, their table, and the comparison of systems.

Text is scored detokenised and cased. Several test sets make one table with their average (as Table 1 of Takase et al.
2022, B2T Connection). Systems are compared by approximate randomization (`significance.py`); SacreBLEU's paired
bootstrap, which papers quote, stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import sacrebleu
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from sacrebleu.utils import SACREBLEU_DIR

from deepnmt.config import Recipe
from deepnmt.config.choices import METRICS
from deepnmt.errors import UserError
from deepnmt.evaluate.ratios import ErrorRate, Rouge
from deepnmt.evaluate.significance import difference, score_of, sentence_statistics
from deepnmt.files import table
from deepnmt.progress import Progress, no_progress
from deepnmt.visitors import find, require_visitors

# The scorer of each of `METRICS` for a target language. flores101 and flores200 are BLEU over the pieces of the
# vocabularies of these names (Goyal et al. 2022, The FLORES-101 Evaluation Benchmark), for languages without spaces and
# for comparisons between languages.
SCORERS: dict[str, Callable[[str], Metric]] = {
    "bleu": lambda lang: sacrebleu.BLEU(trg_lang=lang),
    "chrf": lambda lang: sacrebleu.CHRF(),
    "ter": lambda lang: sacrebleu.TER(),
    "chrf++": lambda lang: sacrebleu.CHRF(word_order=2),
    "flores101": lambda lang: sacrebleu.BLEU(tokenize="flores101"),
    "flores200": lambda lang: sacrebleu.BLEU(tokenize="flores200"),
    "rouge1": lambda lang: Rouge("rouge1", lang),
    "rouge2": lambda lang: Rouge("rouge2", lang),
    "rougeL": lambda lang: Rouge("rougeL", lang),
    "wer": lambda lang: ErrorRate("wer"),
    "cer": lambda lang: ErrorRate("cer"),
}
USUAL = METRICS.where(lambda metric: metric.usual)

Outside = Callable[[str, Sequence[str]], Metric]  # from a name in a recipe's `metrics`, and the sources, to a scorer


@dataclass(frozen=True)
class EvaluationSet:
    """A test set: `references[r][i]` is the r-th reference translation of `sources[i]`; `lang` is their language if it
    is not that of the other sets."""

    name: str
    sources: list[str]
    references: list[list[str]]
    lang: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(f"test set {self.name} has no lines; give a text with at least one")
        for reference in self.references:
            if len(reference) != len(self.sources):
                raise UserError(f"test set {self.name} has {len(self.sources)} source lines and {len(reference)} "
                                "reference lines; line N of one must translate line N of the other")


@dataclass(frozen=True)
class Scores:
    """The scores of one system on one test set, by metric: BLEU, chrF and ROUGE from 0 to 100; error
    rates from 0 up, in percent."""

    values: dict[str, float]
    signatures: dict[str, str]
    sentences: int

    def as_json(self) -> dict[str, Any]:
        """`bleu`, `bleu_signature` and so on, and `sentences`."""
        record: dict[str, Any] = dict(self.values)
        for metric, signature in self.signatures.items():
            record[f"{metric}_signature"] = signature
        record["sentences"] = self.sentences
        return record


@dataclass(frozen=True)
class Comparison:
    """A system against a baseline on one test set and metric.

    Attributes:
        difference: the system's score minus the baseline's.
        p_value: the probability of a difference as large, in either direction, between equal systems.
        sacrebleu_p_value: what SacreBLEU's paired bootstrap prints as p. It is not that probability: of equal systems
            more than a tenth get one below 0.05 (docs/guide/comparing.md has the figure).
        mean, interval: 95 % of the system's scores over the resamples lie within mean ± interval.
    """

    test_set: str
    metric: str
    system: str
    baseline: str
    difference: float
    p_value: float
    sacrebleu_p_value: float
    mean: float
    interval: float
    signature: str


@dataclass(frozen=True)
class Report:
    """Scores by system and test set, in the order of the table; comparisons of all systems with the first."""

    scores: dict[str, dict[str, Scores]]
    comparisons: list[Comparison] = field(default_factory=list)
    lower: frozenset[str] = frozenset()  # of the metrics that are not in `METRICS`, those where lower is better

    def __or__(self, other: Report) -> Report:
        """With the scores of the same systems by other metrics."""
        scores: dict[str, dict[str, Scores]] = {}
        for system, by_set in self.scores.items():
            scores[system] = {}
            for test, mine in by_set.items():
                theirs = other.scores[system][test]
                scores[system][test] = Scores(mine.values | theirs.values, mine.signatures | theirs.signatures,
                                              mine.sentences)
        return Report(scores, self.comparisons + other.comparisons, self.lower)

    @property
    def metrics(self) -> list[str]:
        """Those that were scored, in the order of the table."""
        by_set = next(iter(self.scores.values()))
        scores = next(iter(by_set.values()))
        return list(scores.values)

    def average(self, system: str, metric: str) -> float:
        """The mean over the test sets."""
        values = [scores.values[metric] for scores in self.scores[system].values()]
        return sum(values) / len(values)

    def as_json(self) -> dict[str, Any]:
        """One system: its name and its scores; several: their scores under `systems`, and `comparisons`. Scores are
        `sets` and `average`; those of a single test set are also at the top."""
        systems = {}
        for system, by_set in self.scores.items():
            record: dict[str, Any] = {}
            sets = {name: scores.as_json() for name, scores in by_set.items()}
            if len(sets) == 1:
                record |= next(iter(sets.values()))
            record["sets"] = sets
            record["average"] = {metric: self.average(system, metric) for metric in self.metrics}
            systems[system] = record
        if len(systems) == 1:
            [(system, record)] = systems.items()
            return {"system": system, **record}
        return {"systems": systems, "comparisons": [asdict(comparison) for comparison in self.comparisons]}

    def table(self) -> str:
        """For each metric a row a system, a column a test set, their average and the signature; then comparisons."""
        blocks = [self._table_of(metric) for metric in self.metrics]
        if self.comparisons:
            lines = ["approximate randomization, * where p < 0.05; in brackets p of SacreBLEU's paired bootstrap"]
            for c in self.comparisons:
                star = "*" if c.p_value < 0.05 else ""
                lines.append(f"{c.test_set}: {line_of(c.metric)} of {c.system} is "
                             f"{c.difference:+.{digits_of(c.metric)}f} against {c.baseline}, p = {c.p_value:.4f}{star} "
                             f"({c.sacrebleu_p_value:.4f})")
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)

    def _table_of(self, metric: str) -> str:
        digits = digits_of(metric)
        sets = list(next(iter(self.scores.values())))
        head = line_of(metric)
        if metric in self.lower or (metric in METRICS and METRICS[metric].lower_is_better):
            head += " (lower is better)"
        rows = [[head, *sets]]
        signatures = []  # different ones
        for system, by_set in self.scores.items():
            row = [system]
            for scores in by_set.values():
                row.append(f"{scores.values[metric]:.{digits}f}")
                signature = f"{line_of(metric)}|{scores.signatures[metric]}"
                if signature not in signatures:
                    signatures.append(signature)
            rows.append(row)
        if len(sets) > 1:
            rows[0].append("average")
            for row in rows[1:]:
                row.append(f"{self.average(row[0], metric):.{digits}f}")
        return "\n".join([table(rows), *signatures])


def line_of(metric: str) -> str:
    """What a table calls a metric."""
    return METRICS[metric].line if metric in METRICS else metric


def digits_of(metric: str) -> int:
    """The decimals of a metric; those that a recipe adds may lie between 0 and 1."""
    return 2 if metric in METRICS else 4


def outside_of(recipe: Recipe) -> Outside:
    """The scorers of a recipe's `metrics`, which a visitor brings. Raises `UserError` if it is not there."""
    require_visitors(recipe)
    return partial(find("scorers", "scorer"), recipe)


def score_systems(
    systems: Mapping[str, Sequence[Sequence[str]]], sets: Sequence[EvaluationSet], lang: str,
    metrics: Sequence[str] = USUAL, progress: Progress = no_progress, outside: Outside | None = None,
) -> Report:
    """Scores systems, and compares each with the first.

    Args:
        systems: from a name to the translations of each of `sets`, in their order.
        sets: the test sets.
        lang: the target language; "zh", "ja" and "ko" have SacreBLEU tokenizers, all others use 13a.
        metrics: of `METRICS`, and those that `outside` has.
        progress: is told how many of `steps_of_scoring` are done.

    Raises:
        UserError: a translation has another number of lines than its test set.
    """
    done = 0
    scores: dict[str, dict[str, Scores]] = {}
    for system, translations in systems.items():
        scores[system] = {}
        for test, lines in zip(sets, translations, strict=True):
            name = f"{system} on {test.name}"
            scores[system][test.name] = score_lines(lines, test.references, test.lang or lang, name, metrics, outside,
                                                    test.sources)
            done += len(metrics)
            progress(done)
    comparisons = []
    if len(systems) > 1:
        for number, test in enumerate(sets):
            hypotheses = {system: texts[number] for system, texts in systems.items()}
            for metric in metrics:
                comparisons += compare(hypotheses, test, test.lang or lang, [metric], outside)
                done += len(systems)
                progress(done)
    return Report(scores, comparisons)


def steps_of_scoring(systems: int, sets: int, metrics: int) -> int:
    """How many texts `score_systems` scores, each once and, if there are several systems, once more to compare them."""
    steps = systems * sets * metrics
    if systems > 1:
        steps *= 2
    return steps


def score_lines(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lang: str, name: str = "the translation",
    metrics: Sequence[str] = USUAL, outside: Outside | None = None, sources: Sequence[str] = (),
) -> Scores:
    """These metrics of lines against one or more sets of reference lines; `name` is used in messages.

    Raises:
        UserError: the numbers of lines differ or are 0, or SacreBLEU's tokenizer for `lang` is not installed.
    """
    if len(hypotheses) != len(references[0]):
        raise UserError(f"{name} has {len(hypotheses)} lines, but the reference has {len(references[0])}; put the "
                        "translation of each source line on one line, in the same order")
    if not hypotheses:
        raise UserError(f"{name} has no lines, so there is nothing to score; give a text with at least one")
    values, signatures = {}, {}
    for metric, scorer in make_scorers(lang, metrics, outside, sources).items():
        values[metric] = float(scorer.corpus_score(hypotheses, references).score)
        signatures[metric] = str(scorer.get_signature())
    return Scores(values, signatures, len(hypotheses))


def compare(
    systems: Mapping[str, Sequence[str]], test: EvaluationSet, lang: str, metrics: Sequence[str] = USUAL,
    outside: Outside | None = None,
) -> list[Comparison]:
    """Compares every system with the first on one test set, by `significance.difference` and by SacreBLEU's bootstrap,
    which has 1,000 resamples and SacreBLEU's seed ($SACREBLEU_SEED).

    The systems must have as many lines as the test set (see `score_lines`).
    """
    scorers = make_scorers(lang, metrics, outside, test.sources)
    named = list(systems.items())
    baseline, *others = systems
    comparisons = []
    for metric, scorer in scorers.items():
        # one at a time: it calls them by their scores, and BLEU of other pieces is BLEU
        signatures, scored = PairedTest(named, {metric: scorer}, test.references, test_type="bs")()
        [(name, signature)] = signatures.items()
        results: list[Any] = scored[name]
        first = sentence_statistics(scorer, systems[baseline], test.references)
        for system, bootstrap in zip(others, results[1:], strict=True):
            statistics = sentence_statistics(scorer, systems[system], test.references)
            result = difference(statistics, first, score_of(scorer))
            comparisons.append(Comparison(test.name, metric, system, baseline, result.value, result.p,
                                          float(bootstrap.p_value), float(bootstrap.mean), float(bootstrap.ci),
                                          str(signature)))
    return comparisons


def make_scorers(
    lang: str, metrics: Sequence[str] = USUAL, outside: Outside | None = None, sources: Sequence[str] = ()
) -> dict[str, Metric]:
    """The scorers for a target language, by metric. Raises `UserError` if a tokenizer is not there."""
    scorers = {}
    for metric in metrics:
        if metric not in SCORERS and outside is not None:
            scorers[metric] = outside(metric, sources)
            continue
        try:
            scorers[metric] = SCORERS[metric](lang)
        except RuntimeError:
            raise UserError(f"data.trg_lang is {lang!r}, whose tokenizer is not installed with SacreBLEU by default; "
                            f"run pip install 'sacrebleu[{lang}]'") from None
        except (OSError, SystemExit) as error:  # SacreBLEU exits the process if it cannot download
            raise UserError(f"SacreBLEU's {metric} tokenizer is not in {SACREBLEU_DIR}/models and cannot be downloaded "
                            f"({error}); on a machine with a network run echo | sacrebleu --tokenize {metric} "
                            "/dev/null, copy its folder here, and set the environment variable SACREBLEU to it"
                            ) from None
    return scorers
