"""The task: prepared utterances, a Transformer that reads frames, validation by the word error rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepnmt.data.batching import plan_eval
from deepnmt.device import release
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.speech.data import SpeechStream
from deepnmt.tasks.speech.model import build_of, initial_weights
from deepnmt.tasks.speech.prepare import PreparedSpeech
from deepnmt.tasks.speech.recognise import word_errors
from deepnmt.tasks.speech.settings import SpeechRecipe
from deepnmt.training.dry_run import plan_by_shapes, planned_layout
from deepnmt.training.fine_tuning import check_parts
from deepnmt.training.task import Task, Validation
from deepnmt.training.validation import sum_losses


def _check(recipe: SpeechRecipe) -> None:
    check_parts(recipe, lambda recipe: build_of(recipe, 8)(lambda part: None))


def _stream(recipe: SpeechRecipe, data: PreparedSpeech) -> SpeechStream:
    batch = recipe.batch
    return SpeechStream(data.utterances("train"), batch.tokens, recipe.seed, recipe.spec_augment, batch.update_tokens)


def _start(recipe: SpeechRecipe, layout: Layout, data: PreparedSpeech, ranks: Ranks, initialise: bool) -> Engine:
    engine = build_engine(build_of(recipe, data.vocab.size), recipe, layout, ranks)
    if initialise:
        engine.fill(initial_weights(recipe, data.vocab.size))
    return engine


def validate(recipe: SpeechRecipe, data: PreparedSpeech, engine: Engine, ranks: Ranks) -> Validation:
    """The loss of the whole validation, and the word error rate of its first utterances, without anything hidden.
    Collective."""
    utterances = data.utterances("valid")
    plan = plan_eval(utterances.src_lengths, utterances.trg_lengths, recipe.batch.tokens)
    sums = ranks.sum(sum_losses(plan, lambda rows, device: utterances.batch(rows, 0, device), engine, ranks))
    count = min(recipe.train.valid_sentences or len(utterances), len(utterances))
    wer = word_errors(engine.gather_model(), data.vocab, [utterances.features(row) for row in range(count)],
                      data.texts()[:count], recipe, ranks)
    release(ranks.device)
    return Validation.of_sums(sums, {"wer": wer}, wer if recipe.train.best_by == "wer" else None)


def _plan(recipe: SpeechRecipe, card: str | None) -> str:
    """What `train --dry-run` prints: the recipe, and the figures of the run."""
    _check(recipe)
    layout = planned_layout(recipe)
    epoch = "not prepared yet"
    data, vocab = PreparedSpeech.planned(recipe)
    if data is not None:
        stream = _stream(recipe, data)
        per_update = recipe.batch.entries(layout.data_ranks)
        epoch = f"{stream.epoch_size(0) / per_update:.1f} (padding {100 * stream.waste(0):.1f} %)"
    model = recipe.model
    described = f"{model.depths}, {' / '.join(model.block_names)}, width {model.width}, two convolutions before it"
    rows = {
        "frames per update": f"{recipe.batch.tokens * recipe.batch.per_rank(layout.data_ranks) * layout.data_ranks:,} "
                             "at most",
        "updates per epoch": epoch,
    }
    return plan_by_shapes(recipe, build_of(recipe, vocab), described, rows)


def _describe(record: Mapping[str, Any]) -> str:
    return f" WER {record['wer']:.1f} %"


TASK = Task(
    check=_check, open=PreparedSpeech.open, verify=PreparedSpeech.verify, stream=_stream, start=_start,
    validate=validate, files=lambda data: data.vocab.files, prepare=PreparedSpeech.prepare, plan=_plan,
    describe=_describe)
