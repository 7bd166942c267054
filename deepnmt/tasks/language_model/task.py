"""The task's functions: prepared text, a decoder by itself, validation by perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepnmt.config import Recipe
from deepnmt.data.batching import plan_eval
from deepnmt.data.examples import ExampleStream
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.loss import perplexity
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.language_model.text import PreparedText, blocks_of
from deepnmt.training.dry_run import micro_batches, plan_of
from deepnmt.training.fine_tuning import check_parts, find_trained, origins
from deepnmt.training.profile import profile_on
from deepnmt.training.task import Task, Validation
from deepnmt.training.transformers import start_transformer
from deepnmt.training.validation import sum_losses


def _stream(recipe: Recipe, data: PreparedText) -> ExampleStream:
    batch = recipe.batch
    return ExampleStream(blocks_of(recipe, data, "train"), batch.tokens, recipe.seed, update_tokens=batch.update_tokens)


def _start(recipe: Recipe, layout: Layout, data: PreparedText, ranks: Ranks, initialise: bool) -> Engine:
    vocabs = (data.vocab, data.vocab)

    def profile() -> AdminProfile | None:
        return profile_on(recipe, (data.vocab.size, data.vocab.size), lambda: _stream(recipe, data), ranks,
                          data.fingerprint)

    return start_transformer(recipe, layout, vocabs, ranks, initialise, profile)


def figures(nll: float, counts: Mapping[str, int]) -> dict[str, float]:
    """Of a text whose tokens have this sum of plain losses, in nats: the perplexity a word, and bits a byte."""
    return {"word_perplexity": perplexity(nll, counts["words"]),
            "bits_per_byte": nll / math.log(2) / counts["bytes"]}


def validate(recipe: Recipe, data: PreparedText, engine: Engine, ranks: Ranks) -> Validation:
    """The loss over the validation text, in blocks as training has them; of pairs, over the targets. Collective."""
    blocks = blocks_of(recipe, data, "valid")
    plan = plan_eval(blocks.src_lengths, blocks.trg_lengths, recipe.batch.tokens)
    shares = sum_losses(plan, lambda rows, device: blocks.batch(rows, 0, device), engine, ranks)
    loss, nll, tokens = ranks.sum(shares)
    return Validation.of_sums([loss, nll, tokens], figures(nll, data.counts("valid")))


def _plan(recipe: Recipe, card: str | None) -> str:
    epoch, begin = "not prepared yet", None
    data, size = PreparedText.planned(recipe)
    if data is not None:
        stream = _stream(recipe, data)
        epoch = f"{stream.epoch_size(0) / micro_batches(recipe):.1f} (padding {100 * stream.waste(0):.1f} %)"
        if recipe.train.init_from is not None:
            begin = find_trained(recipe)
            origins(recipe, (data.vocab, data.vocab), begin)
    return plan_of(recipe, card, (size, size), epoch, begin=begin)


def _describe(record: Mapping[str, Any]) -> str:
    return f" {record['word_perplexity']:.2f} a word, {record['bits_per_byte']:.3f} bits a byte"


TASK = Task(
    check=check_parts, open=PreparedText.open, verify=PreparedText.verify, stream=_stream, start=_start,
    validate=validate, files=lambda data: data.vocab.files, prepare=PreparedText.prepare, plan=_plan,
    describe=_describe)
