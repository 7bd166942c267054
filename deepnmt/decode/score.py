"""The scoring job: the log-probabilities that a model, or an ensemble, gives to translations that are there already.

A translation is scored as it is segmented, by the vocabulary or in its file, and up to eos. So the output of
`translate --format jsonl` gets the log-probabilities that the search gave it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepnmt import config
from deepnmt.data.text import ending
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.formats import WRITERS
from deepnmt.decode.models import Folders, load_models, max_length
from deepnmt.decode.next_tokens import LengthPenalty, log_normalisers
from deepnmt.decode.sharing import share
from deepnmt.decode.steppers import Mean, mean_logits
from deepnmt.decode.translate import (
    check_files,
    counted,
    cut,
    in_step,
    one_line,
    padded,
    read_text,
    write_lines,
)
from deepnmt.errors import UserError
from deepnmt.model.dropout import evaluating
from deepnmt.model.loss import perplexity
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress, print_status
from deepnmt.tokens import BOS, EOS, PAD

CHUNK_LOGITS = 2**22  # computed at once


class Given(NamedTuple):
    """A translation to score: its text; its subword pieces, where they are known; whether eos ends it."""

    text: str
    pieces: list[str] | None = None
    ended: bool = True


@dataclass(frozen=True)
class Piece:
    """A subword piece, eos included, its log-probability, and the likeliest pieces there with theirs, best first."""

    piece: str
    log_prob: float
    top: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Scored:
    """A translation: its score (log-probability over length penalty), the sum of its pieces' log-probabilities, its
    number of tokens, without eos; whether eos is counted; the loss that training has on it without label smoothing; and
    its pieces, where they were asked for.

    The loss is the negative log-probability but for the piece that pads batches: training's softmax gives it some
    probability, about 1/V at first, and a search none. An ensemble was not trained, so it makes no such difference.
    """

    text: str
    score: float
    log_prob: float
    tokens: int
    ended: bool = True
    loss: float = 0.0
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Totals:
    """Over all translations: their loss and tokens, eos included; lines that have several translations, and those of
    them whose first is the likeliest."""

    loss: float = 0.0
    tokens: int = 0
    sets: int = 0
    right: int = 0

    def add(self, line: Sequence[Scored]) -> None:
        """Counts the translations of a line."""
        self.loss += sum(scored.loss for scored in line)
        self.tokens += sum(scored.tokens + scored.ended for scored in line)
        if len(line) > 1:
            self.sets += 1
            self.right += line[0].log_prob > max(scored.log_prob for scored in line[1:])

    def __str__(self) -> str:
        mean = self.loss / max(1, self.tokens)
        text = (f"loss {mean:.6f} nats a token over {self.tokens:,} tokens, perplexity "
                f"{perplexity(self.loss, max(1, self.tokens)):.4f}")
        if self.sets:
            text += (f"\naccuracy {self.right / self.sets:.4f}: the first is the likeliest in {self.right:,} of "
                     f"{self.sets:,} lines")
        return text


def score_files(
    folders: Folders,
    source: str,
    translations: str | None,
    target: str,
    settings: config.Translate,
    *,
    output_format: str = "text",
    pieces: bool = False,
    top: int = 0,
    ranks: Ranks | None = None,
    expected: config.Model | None = None,
) -> Totals:
    """Scores the translations in a file; returns the totals of rank 0, which also reports them.

    Args:
        folders, source, target, ranks, expected: see `translate_files`.
        translations: the translations of the source's lines, or the JSON lines that `translate_files` wrote of them;
            without, each line of the source is a sentence and its translations, separated by tabs.
        settings: batch size, precision, length penalty and ensemble are used.
        output_format: of `FORMATS`.
        pieces: whether to tell the log-probability of every piece.
        top: how many of the likeliest pieces to tell beside each, if `pieces`.

    Raises:
        UserError: see `translate_files`; a line has no translation, or it is not as `translations` says.
    """
    ranks = ranks or Ranks.alone()
    inputs = [source] if not translations else [source, translations]
    lines_out = check_files(inputs, target, ranks)
    if settings.backend != "torch":  # an export searches, and knows no log-probabilities of given translations
        settings = settings.model_copy(update={"backend": "torch", "precision": "fp32"})
    models = load_models(folders, settings, ranks, expected)
    totals = Totals()

    def work(items: list[tuple[str, list[Given]]], numbers: list[int], progress: Progress) -> list[list[object]]:
        scored = score_lines(models.all, models.vocabs, items, settings, numbers=numbers, pieces=pieces, top=top,
                             progress=progress)
        return [list(map(asdict, line)) for line in scored]

    def formatted(progress: Progress) -> Iterator[str]:
        items = _tab_separated(source) if translations is None else _side_by_side(source, translations)
        lines = share(items, lambda item: len(item[0]), work, ranks, progress)
        for number, line in enumerate(lines, start=1):
            scored = []
            for record in line:
                record["pieces"] = [Piece(**piece) for piece in record["pieces"]]
                scored.append(Scored(**record))
            totals.add(scored)
            yield WRITERS[output_format].scores(number, scored)

    with counted("{:,} lines scored", ranks) as progress:
        write_lines(lines_out, ranks, formatted(progress))
    if ranks.first:
        print_status(str(totals))
    return totals


def _tab_separated(source: str) -> Iterator[tuple[str, list[Given]]]:
    """The sentence and the translations of every line."""
    for number, line in enumerate(read_text(source), start=1):
        sentence, *translations = line.split("\t")
        if not translations:
            raise UserError(f"{source}, line {number}: no tab; give a sentence and its translations on each line, or "
                            "name the file of the translations with --translations")
        yield sentence, [Given(text) for text in translations]


def _side_by_side(source: str, translations: str) -> Iterator[tuple[str, list[Given]]]:
    """The lines of the source with their translations."""
    for number, (sentence, line) in enumerate(in_step(source, translations), start=1):
        if ending(translations) != "jsonl":
            yield sentence, [Given(line)]
            continue
        try:
            hypotheses = json.loads(line)["hypotheses"]
            known = [Given(str(h["text"]), h.get("pieces"), bool(h.get("ended", True))) for h in hypotheses]
            if not all(isinstance(piece, str) for given in known for piece in given.pieces or ()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{translations}, line {number}: not an object with hypotheses as deepnmt translate "
                            "--format jsonl writes it; give such a file, or one not named .jsonl") from None
        yield sentence, known


def score_lines(
    models: Sequence[Transformer],
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[tuple[str, Sequence[Given]]],
    settings: config.Translate,
    *,
    numbers: Iterable[int] | None = None,
    pieces: bool = False,
    top: int = 0,
    progress: Progress = no_progress,
) -> list[list[Scored]]:
    """Scores sentences' translations on the models' device.

    Args:
        models: one, or an ensemble; the first one's `model.max_length` holds for all.
        vocabs: source and target.
        lines: sentences, each with its translations. What is longer than the model allows is truncated.
        settings, pieces, top: see `score_files`.
        numbers: line numbers, for warnings; by default 1, 2, …
        progress: called after each batch with the number of lines done, or nearly so.

    Raises:
        UserError: a piece is not in the vocabulary.
    """
    src_vocab, trg_vocab = vocabs
    limit = max_length(models[0])
    lines = list(lines)
    results: list[list[Scored]] = []
    rows: list[_Row] = []
    for (text, translations), number in zip(lines, numbers or range(1, len(lines) + 1)):
        source = [*cut(src_vocab.encode(text.strip()), limit, f"line {number}", "used", True), EOS]
        results.append([Scored("", 0.0, 0.0, 0)] * len(translations))
        for place, translation in enumerate(translations):
            ids = _ids(translation, trg_vocab, number)
            if translation.ended:
                ids = [*cut(ids, limit, f"the translation of line {number}", "scored", True), EOS]
            target = ids[:limit]
            if target:
                rows.append(_Row(len(results) - 1, place, source, target, translation))
    penalty = LengthPenalty(settings.length_penalty, settings.alpha)
    rows.sort(key=lambda row: -row.longest)
    done = 0
    with ExitStack() as stack, torch.inference_mode():
        for model in models:
            stack.enter_context(evaluating(model))
        while done < len(rows):
            batch = rows[done : done + max(1, settings.batch_tokens // rows[done].longest)]
            scores = _score(models, batch, settings.ensemble, top)
            for row, (log_probs, padding, likeliest) in zip(batch, scores, strict=True):
                text, ended = one_line(row.translation.text), row.translation.ended
                total = math.fsum(log_probs)
                score = total / penalty.divisor(len(row.target))
                its_pieces = _pieces(trg_vocab, row.target, log_probs, likeliest) if pieces else []
                results[row.line][row.place] = Scored(text, score, total, len(row.target) - ended, ended,
                                                      padding - total, its_pieces)
            done += len(batch)
            progress(len(lines) * done // len(rows))
    return results


class _Row(NamedTuple):
    """A translation to score: its line, which of the line's it is (both from 0), and the token ids of both sides."""

    line: int
    place: int
    source: list[int]
    target: list[int]
    translation: Given

    @property
    def longest(self) -> int:
        return max(len(self.source), len(self.target))


def _pieces(
    vocab: Vocabulary, ids: Sequence[int], log_probs: Sequence[float], likeliest: Sequence[Sequence[tuple[int, float]]]
) -> list[Piece]:
    """The pieces of a translation, each with its log-probability and the likeliest tokens at its place."""
    pieces = []
    for piece, log_prob, best in zip(vocab.to_pieces(ids), log_probs, likeliest):
        others = [(vocab.to_pieces([token])[0], value) for token, value in best]
        pieces.append(Piece(piece, log_prob, others))
    return pieces


def _ids(translation: Given, vocab: Vocabulary, number: int) -> list[int]:
    """The token ids of a translation, without eos."""
    if translation.pieces is None:
        return vocab.encode(translation.text.strip())
    ids = vocab.to_ids(translation.pieces)
    if ids is None:
        raise UserError(f"the translation of line {number} has pieces that are not in this model's vocabulary; score "
                        "its text, a translation a line, in place of its pieces")
    return ids


def _score(
    models: Sequence[Transformer], rows: Sequence[_Row], mean: Mean, top: int
) -> list[tuple[list[float], float, list[list[tuple[int, float]]]]]:
    """Of each target the log-probabilities of its tokens, how much these would be lower in sum if pad had its share of
    the probability, and the `top` likeliest tokens at each place, with theirs."""
    device = models[0].output_weight.device
    src = padded([row.source for row in rows], device)
    lengths = torch.tensor([len(row.source) for row in rows], device=device)
    out = padded([row.target for row in rows], device)
    begin = padded([[BOS, *row.target[:-1]] for row in rows], device)
    here = (out != PAD).flatten().nonzero().squeeze(1)
    targets = out.flatten()[here]
    hidden = [model.decode(begin, model.encode(src, lengths), lengths).flatten(0, 1)[here] for model in models]
    size = max(1, CHUNK_LOGITS // len(models[0].output_weight))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(here), size):
        of_models = []
        for model, states in zip(models, hidden, strict=True):
            of_models.append(model.logits(states[start : start + size]))
        logits = mean_logits(of_models, mean).float()
        norms = log_normalisers(logits)
        best = logits.topk(min(top, logits.size(1) - 1))  # pad has no probability
        chosen = logits.gather(1, targets[start : start + size, None]).squeeze(1)
        pad = torch.full_like(norms, -torch.inf)
        if len(models) == 1:
            pad = (hidden[0][start : start + size] @ models[0].output_weight[PAD]).float()
        padding = torch.logaddexp(norms, pad) - norms
        parts.append((chosen - norms, padding, best.values - norms[:, None], best.indices))
    log_probs, paddings, values, tokens = (torch.cat(column).tolist() for column in zip(*parts))
    results, start = [], 0
    for row in rows:
        span = slice(start, start + len(row.target))
        likeliest = [list(zip(*best)) for best in zip(tokens[span], values[span])]
        results.append((log_probs[span], math.fsum(paddings[span]), likeliest))
        start = span.stop
    return results
