"""The task: prepared utterances, a Transformer that reads frames, validation by the word error rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from deepnmt.checkpoint.checkpoint import SRC_VOCAB, TRG_VOCAB, shapes_of
from deepnmt.config import Recipe, dump_recipe
from deepnmt.data.batching import plan_eval
from deepnmt.device import release
from deepnmt.optim.schedules import warmup_note
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import Layout, layout_of
from deepnmt.processes.launch import rank_from_environment
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.speech.data import SpeechStream
from deepnmt.tasks.speech.model import build_of, initial_weights
from deepnmt.tasks.speech.prepare import PreparedSpeech, open_speech, prepare_speech
from deepnmt.tasks.speech.recognise import word_errors
from deepnmt.tasks.speech.settings import SpeechRecipe
from deepnmt.training.fine_tuning import check_parts
from deepnmt.training.plan import disk_note
from deepnmt.training.task import Task, Validation


def _check(recipe: Recipe) -> None:
    check_parts(recipe, lambda recipe: build_of(recipe, 8)(lambda part: None))


def _stream(recipe: Recipe, data: PreparedSpeech) -> SpeechStream:
    settings, batch = cast(SpeechRecipe, recipe).spec_augment, recipe.batch
    return SpeechStream(data.utterances("train"), batch.tokens, recipe.seed, settings, batch.update_tokens)


def _start(recipe: Recipe, layout: Layout, data: PreparedSpeech, ranks: Ranks, initialise: bool) -> Engine:
    engine = build_engine(build_of(recipe, data.vocab.size), recipe, layout, ranks)
    if initialise:
        engine.fill(initial_weights(recipe, data.vocab.size))
    return engine


def validate(recipe: Recipe, data: PreparedSpeech, engine: Engine, ranks: Ranks) -> Validation:
    """The loss of the whole validation, and the word error rate of its first utterances, without anything hidden.
    Collective."""
    utterances = data.utterances("valid")
    plan = plan_eval(utterances.src_lengths, utterances.trg_lengths, recipe.batch.tokens)
    sums = [0.0, 0.0, 0.0]
    for turn in range(math.ceil(len(plan) / ranks.world)):  # the same on all: ZeRO-3 gathers weights in every forward
        index = turn * ranks.world + ranks.rank
        batch = utterances.whole_batch(plan[index if index < len(plan) else 0], ranks.device)
        [(loss, nll)] = engine.evaluate([batch])
        if index < len(plan):
            sums = [sums[0] + loss, sums[1] + nll, sums[2] + batch.tokens]
    loss, nll, tokens = ranks.sum(sums)
    count = min(recipe.train.valid_sentences or len(utterances), len(utterances))
    wer = word_errors(engine.gather_model(), data.vocab, [utterances.features(row) for row in range(count)],
                      data.texts()[:count], cast(SpeechRecipe, recipe), ranks)
    release(ranks.device)
    value = wer if str(recipe.train.best_by) == "wer" else loss / tokens
    return Validation(loss / tokens, math.exp(min(nll / tokens, 50.0)), value, {"wer": wer})


def _plan(recipe: Recipe, card: str | None) -> str:
    """What `train --dry-run` prints: the recipe, and the figures of the run."""
    _check(recipe)
    layout = layout_of(recipe, rank_from_environment()[1])
    vocab, epoch = recipe.vocab.size, "not prepared yet"
    if Path(recipe.data.folder).exists():
        data = open_speech(cast(SpeechRecipe, recipe))
        vocab, stream = data.vocab.size, _stream(recipe, data)
        per_update = recipe.batch.entries(layout.data_ranks)
        epoch = f"{stream.epoch_size(0) / per_update:.1f} (padding {100 * stream.waste(0):.1f} %)"
    with torch.device("meta"):
        shapes = shapes_of(dict(build_of(recipe, vocab)(lambda part: None).named_parameters()))
    parameters = sum(map(math.prod, shapes.values()))
    model = recipe.model
    rows = {
        "model": f"{model.depths}, {' / '.join(model.block_names)}, width {model.width}, two convolutions before it",
        "parameters": f"{parameters:,}",
        "frames per update": f"{recipe.batch.tokens * recipe.batch.per_rank(layout.data_ranks) * layout.data_ranks:,} "
                             "at most",
        "updates per epoch": epoch,
        "layout": "plain PyTorch, fp32" if layout.config is None else
                  f"DeepSpeed ZeRO-{layout.stage}, {layout.precision}",
        "disk": disk_note(recipe, parameters),
    }
    if note := warmup_note(recipe):
        rows["learning rate"] = note
    width = max(map(len, rows))
    return "\n".join([dump_recipe(recipe), *(f"# {key:<{width}}  {value}" for key, value in rows.items())])


def _describe(record: Mapping[str, Any]) -> str:
    return f" WER {record['wer']:.1f} %"


TASK = Task(
    check=_check, open=lambda recipe, texts: open_speech(cast(SpeechRecipe, recipe), texts),
    verify=PreparedSpeech.verify, stream=_stream, start=_start, validate=validate,
    files=lambda data: dict.fromkeys((SRC_VOCAB, TRG_VOCAB), data.vocab.bytes),
    prepare=lambda recipe, part: prepare_speech(cast(SpeechRecipe, recipe), part), plan=_plan, describe=_describe)
