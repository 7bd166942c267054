"""The translation job: lines of text in, as many lines out, in the same order.

An empty line gives an empty line, an over-long one is cut with a warning. Several processes share the lines of one
input.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepnmt import config
from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import load_model, require_model
from deepnmt.data.text import read_lines
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.lines import Form, Hypothesis, one_line, progressing, record, writing
from deepnmt.decode.next_tokens import EOS, PAD, LengthPenalty
from deepnmt.decode.search import Candidate, Draw, beam_search, follow, most_likely
from deepnmt.decode.steppers import CachedStepper, MakeStepper
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer

CHUNK = 10_000  # lines sorted by length, translated and written together: what the job holds in memory

Gather = Callable[[bytes], "list[bytes] | None"]  # every process's bytes, in rank order, to rank 0; None elsewhere

log = logging.getLogger(__name__)

EMPTY = Hypothesis("", 0.0, 0.0, 0, True)


@dataclass(frozen=True)
class Report:
    """What a process has done: lines it wrote, and the seconds that took without loading the model."""

    lines: int
    seconds: float


def cast(model: Transformer, precision: Literal["fp32", "bf16"]) -> Transformer:
    """The same model, its weights now in that type. The table of positions stays fp32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def silent(lines: int) -> None:
    """The listener that says nothing."""


def alone(data: bytes) -> list[bytes] | None:
    """The gathering of a single process."""
    return [data]


def translate_lines(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    *,
    seed: int = 1,
    numbers: Iterable[int] | None = None,
    stepper: MakeStepper = CachedStepper,
    advance: Callable[[int], None] = silent,
    warn: bool = True,
) -> list[list[Hypothesis]]:
    """Translates on the model's device.

    Args:
        model: of any mode and float type; its mode is put back.
        vocabs: source and target.
        lines: texts. One without a token gives one empty hypothesis; one longer than the model allows is cut.
        settings: the search.
        seed: of sampling. A line's samples are a function of (seed, its number, model) alone.
        numbers: of the lines, for sampling and warnings; 1, 2, … if not given.
        stepper: how the model is stepped.
        advance: told after each batch how many lines it held.
        warn: whether to say which lines are cut.

    Returns:
        For each line, in their order, at most `settings.nbest` hypotheses, best first.

    Raises:
        UserError: the model's scores are not numbers.
    """
    src_vocab, trg_vocab = vocabs
    search = _Search(model, settings, seed, stepper)
    texts = list(lines)
    ids = list(range(1, len(texts) + 1)) if numbers is None else list(numbers)
    sources = [_source(src_vocab, text, number if warn else None, search.longest)
               for text, number in zip(texts, ids, strict=True)]
    results: list[list[Hypothesis]] = [[EMPTY] for _ in texts]
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in _batches([len(source) for source in sources], settings.batch_tokens, search.width):
                found = search([sources[i] for i in batch], [ids[i] for i in batch])
                for i, candidates in zip(batch, found, strict=True):
                    results[i] = [_hypothesis(trg_vocab, candidate) for candidate in candidates]
                advance(len(batch))
    finally:
        model.train(training)
    return results


def _source(vocab: Vocabulary, text: str, number: int | None, limit: int) -> list[int]:
    """A line's token ids with eos, at most `limit`; none for an empty line. What is cut is said if it has a number."""
    pieces = vocab.encode(text.strip())
    if number is not None and len(pieces) >= limit:
        log.warning("line %d has %d tokens; only its first %d are translated (model.max_length is %d)",
                    number, len(pieces), limit - 1, limit)
    return [*pieces[: limit - 1], EOS] if pieces else []


def _batches(lengths: Sequence[int], tokens: int, width: int) -> Iterator[list[int]]:
    """Numbers of the sentences with tokens, longest first, in batches of at most `tokens` positions.

    Padding counts, and a sentence counts once for each of its `width` hypotheses: memory does not depend on the beam.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, tokens // (lengths[order[start]] * width))
        yield order[start : start + size]
        start += size


class _Search:
    """The search that `settings` describe, for one batch after the other. Source lengths and limits count eos."""

    def __init__(self, model: Transformer, settings: config.Translate, seed: int, stepper: MakeStepper) -> None:
        self.model, self.settings, self.seed, self.stepper = model, settings, seed, stepper
        self.longest = model.encoder.input.positions.size(0)  # model.max_length
        # hypotheses that grow at once for a sentence
        self.width = {"beam": settings.beam, "greedy": 1, "sample": settings.nbest}[settings.method]

    def __call__(self, sources: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[Candidate]]:
        """The hypotheses of sources (token ids with eos) that stand in lines `numbers`, best first."""
        settings, device = self.settings, self.model.output_weight.device
        rows = [torch.tensor(source) for source in sources]
        src = pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
        lengths = [len(source) for source in sources]
        longest = [self._limit(length) for length in lengths]
        limits = torch.tensor(longest, device=device)
        state = self.stepper(self.model, src, torch.tensor(lengths, device=device), self.width, max(longest))
        penalty = LengthPenalty(settings.length_penalty, settings.alpha)
        if settings.method == "beam":
            return beam_search(state, limits, self.width, settings.nbest, penalty, settings.patience)
        if settings.method == "greedy":
            return follow(state, limits, self.width, most_likely, penalty)
        draw = Draw(self._uniforms(numbers, longest).to(device), settings.temperature)
        return follow(state, limits, self.width, draw, penalty)

    def _limit(self, length: int) -> int:
        """The most tokens of a translation of `length` tokens."""
        return min(self.longest, max(1, int(self.settings.max_ratio * length) + self.settings.max_extra))

    def _uniforms(self, numbers: Sequence[int], limits: Sequence[int]) -> Tensor:
        """Numbers in [0, 1) [B, width, M], those of a line a function of (seed, the line's number)."""
        drawn = torch.zeros(len(numbers), self.width, max(limits))
        for row, number, limit in zip(drawn, numbers, limits, strict=True):
            generator = np.random.default_rng((self.seed, number))
            row[:, :limit] = torch.from_numpy(generator.random((self.width, limit), dtype=np.float32))
        return drawn


def _hypothesis(vocab: Vocabulary, candidate: Candidate) -> Hypothesis:
    text = one_line(vocab.decode(candidate.tokens))
    return Hypothesis(text, candidate.score, candidate.log_prob, len(candidate.tokens), candidate.ended)


def translate_shards(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    *,
    seed: int = 1,
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    stepper: MakeStepper = CachedStepper,
    progress: Callable[[int], None] = silent,
    warn: bool = True,
) -> Iterator[list[Hypothesis]]:
    """`translate_lines` for any number of lines, shared among `world` processes which all call this with the same
    `lines` and exhaust it. Rank 0 gets every line's hypotheses in order, the others get none.

    Lines pass in chunks of `CHUNK`; of a chunk each process takes every `world`-th line in the order of length, so that
    all finish together. What they gather is JSON, nothing is unpickled. `progress` is told how many lines are done.
    """
    start = 0
    stream = iter(lines)
    while chunk := list(itertools.islice(stream, CHUNK)):
        mine = sorted(range(len(chunk)), key=lambda i: (-len(chunk[i]), i))[rank::world]
        found = translate_lines(
            model, vocabs, [chunk[i] for i in mine], settings, seed=seed, numbers=[start + i + 1 for i in mine],
            stepper=stepper, advance=_Count(start, len(chunk), world, progress).add, warn=warn,
        )
        shard = [[i, [list(asdict(h).values()) for h in best]] for i, best in zip(mine, found, strict=True)]
        shards = gather(json.dumps(shard).encode())
        start += len(chunk)
        if shards is not None:
            whole = {i: [Hypothesis(*h) for h in best] for part in shards for i, best in json.loads(part)}
            yield from (whole[i] for i in range(len(chunk)))
            progress(start)


class _Count:
    """Turns the lines this process has done of a chunk into those done by all: the others are about as far."""

    def __init__(self, start: int, size: int, world: int, progress: Callable[[int], None]) -> None:
        self._start, self._size, self._world, self._progress = start, size, world, progress
        self._own = 0

    def add(self, lines: int) -> None:
        self._own += lines
        self._progress(self._start + min(self._size, self._own * self._world))


def translate_files(
    folder: Path,
    source: str,
    target: str,
    settings: config.Translate,
    *,
    form: Form = "text",
    seed: int = 1,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    stepper: MakeStepper = CachedStepper,
    expected: config.Model | None = None,
) -> Report:
    """Translates a file with the model of a checkpoint or run folder.

    Args:
        folder: as for `checkpoint.load_model`.
        source: UTF-8 text, plain or .gz; "-" is standard input (with one process only).
        target: appears when it is complete; "-" is standard output.
        settings: the search.
        form: text: the best translation of each line, alone. tsv: "line, rank, score, text" for each hypothesis, line
            and rank from 1. jsonl: one object for each line.
        seed: of sampling.
        device: of the model.
        rank, world, gather: of several processes, see `translate_shards`. Rank 0 writes and reports progress.
        stepper: how the model is stepped.
        expected: what the checkpoint must hold; without, any model.

    Raises:
        UserError: a file cannot be read or written, or is not UTF-8; `form` cannot hold what is asked for; the model
            is not the one `expected`.
    """
    lines_in, lines_out = _checked(source, target, settings.nbest, form, world)
    loaded = load_model(folder)
    require_model(loaded.folder, expected)
    if rank == 0:
        warn_if_outdated(loaded.folder)
    model, vocabs = cast(loaded.model, settings.precision).to(device), (loaded.src_vocab, loaded.trg_vocab)
    begin = time.perf_counter()
    written = 0
    with progressing() as progress:
        translated = translate_shards(
            model, vocabs, read_lines(lines_in), settings, seed=seed, rank=rank, world=world, gather=gather,
            stepper=stepper, progress=progress.at if rank == 0 else silent,
        )
        if rank > 0:
            return Report(sum(1 for _ in translated), time.perf_counter() - begin)
        with writing(lines_out) as out:
            for written, hypotheses in enumerate(translated, start=1):
                out.write(record(written, hypotheses, form))
    report = Report(written, time.perf_counter() - begin)
    print(f"{report.lines:,} lines in {report.seconds:.1f} s: {report.lines / report.seconds:.1f} lines/s",
          file=sys.stderr)
    return report


def _checked(source: str, target: str, nbest: int, form: Form, world: int) -> tuple[Path | None, Path | None]:
    """Input and output as paths, None for a standard stream. Raises `UserError` where they cannot be used."""
    if form == "text" and nbest > 1:
        raise UserError(f"translate.nbest is {nbest}, but the format text holds one translation a line; choose the "
                        "format tsv or jsonl, or translate.nbest=1")
    if source == "-" and world > 1:
        raise UserError(f"standard input reaches one process only, but {world} were launched; name an input file, or "
                        "launch one process")
    lines_in, lines_out = (None if name == "-" else Path(name) for name in (source, target))
    if lines_in is not None and not lines_in.is_file():
        raise UserError(f"there is no input file {lines_in}; give an existing text or .gz file, or - for the standard "
                        "input")
    if lines_in is not None and lines_out is not None and lines_out.exists() and lines_out.samefile(lines_in):
        raise UserError(f"output {lines_out} is the input file itself; give another output")
    if lines_out is not None and lines_out.is_dir():
        raise UserError(f"output {lines_out} is a folder; give the name of a file in it")
    return lines_in, lines_out
