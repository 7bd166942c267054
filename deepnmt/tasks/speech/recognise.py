"""From audio to text with a trained model: utterances, lists of them, and test sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from deepnmt import config
from deepnmt.checkpoint.checkpoint import (
    TRG_VOCAB,
    Which,
    load_weights_into,
    open_model,
    require_model,
)
from deepnmt.config.choices import FORMATS, SEARCHES
from deepnmt.data.text import files_of
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.formats import WRITERS
from deepnmt.decode.models import cast_weights, max_length
from deepnmt.decode.sharing import share
from deepnmt.decode.steppers import CachedStepper
from deepnmt.decode.translate import (
    Hypothesis,
    check_files,
    counted,
    most_steps,
    one_line,
    read_text,
    search_batch,
    write_lines,
)
from deepnmt.errors import UserError, enough_memory
from deepnmt.evaluate.evaluate import require_different, scores_file, text_name, texts_folder
from deepnmt.evaluate.metrics import EvaluationSet, score_systems
from deepnmt.evaluate.ratios import edits
from deepnmt.files import make_run_folder, reporting, write_json, write_text
from deepnmt.model.dropout import evaluating
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress, print_status
from deepnmt.tasks.speech.audio import Utterance, read_lists, utterance_of
from deepnmt.tasks.speech.data import Frames, padded_frames
from deepnmt.tasks.speech.model import SpeechTransformer, build_of
from deepnmt.tasks.speech.prepare import CHUNK, read_features
from deepnmt.tasks.speech.settings import SHORTER, SpeechRecipe
from deepnmt.tokens import UNK

METRICS = ("wer", "cer")


def load_speech(folder: Path, which: Which = "auto", expected: config.Model | None = None
                ) -> tuple[SpeechTransformer, Vocabulary, SpeechRecipe, Path]:
    """A trained model in evaluation mode on the CPU, its vocabulary, its recipe and its checkpoint; `folder` is a
    checkpoint or a run. Raises `UserError` if there is none, it is damaged, or holds another model than `expected`."""
    checkpoint, recipe = open_model(folder, which, "speech")
    require_model(checkpoint, expected)
    vocab = Vocabulary.load(checkpoint / TRG_VOCAB)
    model, _ = load_weights_into(build_of(recipe, vocab.size), checkpoint)
    return cast(SpeechTransformer, model), vocab, cast(SpeechRecipe, recipe), checkpoint


def recognise(
    model: SpeechTransformer, vocab: Vocabulary, features: Sequence[Frames], settings: config.Translate, *,
    seed: int = 1, numbers: Sequence[int] | None = None, progress: Progress = no_progress,
) -> list[list[Hypothesis]]:
    """At most `settings.nbest` hypotheses of each utterance, best first, in the same order.

    Args:
        features: [frames, 80] of each, normalised.
        settings: of the search.
        seed, numbers: of sampling, and the utterances' numbers, from 1.
        progress: is told how many are done.
    """
    positions = [-(-len(frames) // SHORTER) for frames in features]
    order = sorted(range(len(features)), key=lambda i: (-positions[i], i))
    if numbers is None:
        numbers = range(1, len(features) + 1)
    results: list[list[Hypothesis]] = [[] for _ in features]
    barred = () if settings.unknown else (UNK,)
    width: int = getattr(settings, SEARCHES[settings.method].width)
    device = model.output_weight.device
    done = 0
    remedy = f"lower translate.beam ({settings.beam:,}) or translate.batch_tokens ({settings.batch_tokens:,})"
    with evaluating(model), torch.inference_mode(), enough_memory(remedy):
        while done < len(order):
            size = max(1, settings.batch_tokens // (positions[order[done]] * width))
            batch = order[done:done + size]
            src, lengths = padded_frames([features[i] for i in batch])
            most = [most_steps(model, settings, int(length)) for length in lengths]
            candidates = search_batch(model, torch.from_numpy(src).to(device), lengths.tolist(), most,
                                      [[]] * len(batch), [numbers[i] for i in batch], settings, seed, CachedStepper,
                                      barred)
            for i, best in zip(batch, candidates, strict=True):
                for c in best:
                    text, pieces = one_line(vocab.decode(c.tokens)), vocab.to_pieces(c.tokens)
                    results[i].append(Hypothesis(text, c.score, c.log_prob, len(c.tokens), c.ended, pieces))
            done += len(batch)
            progress(done)
    return results


def recognise_shared(
    model: SpeechTransformer, vocab: Vocabulary, utterances: Sequence[Utterance], recipe: SpeechRecipe,
    settings: config.Translate, ranks: Ranks, progress: Progress = no_progress,
) -> Iterator[list[Hypothesis]]:
    """`recognise` for utterances, shared among processes. Yields the hypotheses of each in order on rank 0, nothing on
    other ranks. Collective."""
    data = recipe.data

    def work(items: list[Utterance], numbers: list[int], progress: Progress) -> list[list[dict[str, Any]]]:
        most = SHORTER * max_length(model)
        setting = f"{SHORTER} times the model's max_length"
        features = [frames for _, frames in read_features(items, data.sample_rate, most, data.workers, setting)]
        results = recognise(model, vocab, features, settings, seed=recipe.seed, numbers=numbers, progress=progress)
        return [list(map(asdict, best)) for best in results]

    def length(utterance: Utterance) -> int:
        if not utterance.file.is_file():
            return 0
        return utterance.file.stat().st_size

    # fewer at a time than lines of a text: an utterance's features take a hundred times the memory
    for best in share(utterances, length, work, ranks, progress, size=CHUNK * ranks.world):
        yield [Hypothesis(**hypothesis) for hypothesis in best]


def recognise_list(
    folder: str | Path, source: str, target: str, settings: config.Translate, *, output_format: str = "text",
    ranks: Ranks | None = None, expected: config.Model | None = None,
) -> None:
    """Writes the text of each utterance of a list, whose transcripts, if it has them, are not looked at.

    Args:
        folder: a checkpoint or a run.
        source: the list; "-" is standard input.
        target: the output file; "-" is standard output.
        settings: of the search.
        output_format: of `FORMATS`.
        ranks: several processes, which share the utterances; by default this one, on the CPU.
        expected: the model that the checkpoint must hold; None: any.

    Raises:
        UserError: a file cannot be read or written, an utterance is faulty, or the format has no room for n-best lists.
    """
    ranks = ranks or Ranks.alone()
    if settings.nbest > 1 and not FORMATS[output_format].many:
        raise UserError(f"translate.nbest is {settings.nbest}, but the format {output_format} holds one text a line; "
                        "choose another format, or set translate.nbest=1")
    out = check_files([source], target, ranks)
    model, vocab, recipe, _ = load_speech(Path(folder), expected=expected)
    cast_weights(model, settings.precision).to(ranks.device)
    listed = None if source == "-" else Path(source)
    utterances = [utterance_of(line, number, listed) for number, line in enumerate(read_text(source), start=1)]
    with counted("{:,} utterances recognised", ranks) as progress:
        results = recognise_shared(model, vocab, utterances, recipe, settings, ranks, progress)
        write_lines(out, ranks, map(WRITERS[output_format].hypotheses, itertools.count(1), results))


def score_lists(
    recipe: SpeechRecipe, folder: str | Path, names: Sequence[str], ranks: Ranks, expected: config.Model | None = None,
) -> str:
    """A table of word and character error rates of a trained model on test sets of the recipe; "" on other ranks than
    the first. `scores_file` has the same, and the texts are in a folder of its name. Raises `UserError`."""
    tests = recipe.data.test
    for name in names:
        if name not in tests:
            raise UserError(f"there is no test set {name} in data.test, which has {', '.join(tests) or 'none'}")
    if not tests:
        raise UserError("the recipe has no data.test; name lists there, as in data.test.clean=clean.tsv")
    require_different(names or [*tests])
    lists = {name: list(read_lists(files_of(tests[name]), f"data.test.{name}")) for name in names or tests}
    sets = [EvaluationSet(name, [utterance.where for utterance in utterances],
                          [[utterance.text for utterance in utterances]]) for name, utterances in lists.items()]
    file = scores_file(recipe, sets, names, checkpoints=[folder])
    if ranks.first:
        make_run_folder(file.parent)  # before the work
    model, vocab, _, checkpoint = load_speech(Path(folder), expected=expected)
    cast_weights(model, recipe.translate.precision).to(ranks.device)
    texts = {}
    for name, utterances in lists.items():
        results = recognise_shared(model, vocab, utterances, recipe, recipe.translate, ranks)
        texts[name] = [best[0].text for best in results]
    if not ranks.first:
        return ""
    report = score_systems({Path(recipe.run).name: list(texts.values())}, sets, "", METRICS)
    with reporting(str(file), "free disk space, or give write permission"):
        texts_folder(file).mkdir(parents=True, exist_ok=True)
        for name, lines in texts.items():
            write_text(texts_folder(file) / f"{text_name(name)}.hyp", "".join(f"{line}\n" for line in lines))
        write_json(file, {**report.as_json(), "checkpoint": str(checkpoint),
                          "translate": recipe.translate.model_dump()}, indent=1)
    print_status(f"scores are in {file}")
    return report.table()


def word_errors(model: Any, vocab: Vocabulary, features: Sequence[Frames], texts: Sequence[str], recipe: SpeechRecipe,
                ranks: Ranks) -> float:
    """The word error rate in % of a greedy search; each process takes a share. Collective."""
    settings = config.Translate(method="greedy", batch_tokens=recipe.translate.batch_tokens,
                                max_ratio=recipe.translate.max_ratio, max_extra=recipe.translate.max_extra)
    mine = range(ranks.rank, len(features), ranks.world)
    results = recognise(model, vocab, [np.asarray(features[i]) for i in mine], settings)
    errors = words = 0.0
    for i, best in zip(mine, results, strict=True):
        reference = texts[i].split()
        errors += edits(best[0].text.split(), reference)
        words += len(reference)
    errors, words = ranks.sum([errors, words])
    return 100.0 * errors / max(1.0, words)
