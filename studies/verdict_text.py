"""The runs on real text that the doctor's verdict is fitted on and tested with: small models, trained by deepnmt itself.

Every run is one line of a JSON-lines file: its point, the features measured before training, the outcome measured after
it (`doctor/outcome.py`). Points are drawn at random from a seed, in a fixed order, so a stopped file is a fair sample,
and the same command trains the missing ones. Texts are read from the folder `DEEPNMT_CORPORA`.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepnmt.config import Recipe, check_recipe
from deepnmt.data.batching import Stream, collate
from deepnmt.data.prepared import PreparedData
from deepnmt.doctor.diagnose import first_batch
from deepnmt.doctor.outcome import frequencies_loss, measure_outcome
from deepnmt.doctor.probes import plain_loss
from deepnmt.doctor.variants import fresh_model
from deepnmt.doctor.verdict import other_sources, static_features, update_features
from deepnmt.parallel.local import LocalEngine
from deepnmt.ranks import Ranks
from deepnmt.training.profile import profile_for
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates

Record = dict[str, Any]

CORPORA = {  # source and target language, training and validation text
    "multi30k": ("de", "en", "multi30k/train.{}.gz", "multi30k/val.{}.gz"),
    "europarl": ("de", "en", "europarl/train.{}", "europarl/valid.{}"),
    "tatoeba": ("de", "en", "tatoeba/train.{}", "tatoeba/valid.{}"),
    "tatoeba_fr": ("fr", "en", "tatoeba_fr/train.{}", "tatoeba_fr/valid.{}"),
    "newstest": ("de", "en", "newstest/train.{}", "newstest/valid.{}"),
}
BLOCKS = ("post_ln", "pre_ln", "admin", "b2t", "b2t_no_ln", "deepnorm", "rezero", "fixup", "t_fixup",
          "admin_closed_form")
TOKENS = 256  # target tokens of the measured batch
STREAM = 40  # updates of the trial on the recipe's own stream
INTERVAL = 10


@dataclass(frozen=True)
class TextPoint:
    """One run."""

    corpus: str
    pieces: int
    encoder: str
    decoder: str
    encoder_layers: int
    decoder_layers: int
    width: int
    rate: float
    warmup: int
    schedule: str
    updates: int
    tokens: int
    dropout: float
    clip: float
    smoothing: float
    optimizer: str
    init: str
    seed: int

    def recipe(self, data: Path) -> Recipe:
        """The recipe of the run, with its prepared data under `data`."""
        src, trg, train, valid = CORPORA[self.corpus]
        root = os.environ["DEEPNMT_CORPORA"]
        texts = {name: {"src": f"{root}/{text.format(src)}", "trg": f"{root}/{text.format(trg)}"}
                 for name, text in (("train", train), ("valid", valid))}
        return check_recipe({
            "run": "-", "seed": self.seed,
            "data": {"folder": str(data / f"{self.corpus}_{self.pieces}"), "src_lang": src, "trg_lang": trg, **texts,
                     "workers": 1, "filters": {"max_tokens": 100}},
            "vocab": {"size": self.pieces, "shared": True}, "batch": {"tokens": self.tokens},
            "model": {"width": self.width, "heads": 4, "ffn": 2 * self.width, "dropout": self.dropout, "tied": "all",
                      "max_length": 128,
                      "encoder": {"block": self.encoder, "layers": self.encoder_layers, "init": self.init},
                      "decoder": {"block": self.decoder, "layers": self.decoder_layers, "init": self.init}},
            "optimizer": {"name": self.optimizer, "lr": self.rate, "betas": [0.9, 0.98]},
            "schedule": {"name": self.schedule, "warmup": self.warmup},
            "train": {"updates": self.updates, "label_smoothing": self.smoothing, "clip": self.clip},
            "parallel": {"ds_config": None, "threads": 1},
        }, "a point of the text runs")


def draw(count: int, seed: int, corpora: Sequence[str], depths: Sequence[int], blocks: Sequence[str] = BLOCKS,
         seconds: tuple[float, float] = (1.0, 3.5)) -> list[TextPoint]:
    """Points drawn at random, of a few seconds of one core each. Half of them are likely to learn: a middling rate, a
    warm-up, the widest model."""
    chance = random.Random(seed)
    points = []
    while len(points) < count:
        encoder = chance.choice(blocks)
        decoder = chance.choice(blocks) if chance.random() < 0.2 else encoder
        layers = [chance.choice(depths), chance.choice(depths)] if chance.random() < 0.3 else [chance.choice(depths)] * 2
        kind = chance.random() < 0.6
        budget = chance.choice((60, 80, 120, 160, 200, 240, 320))
        tokens, width = chance.choice((300, 400, 500, 600)), chance.choice((48, 64) if kind else (32, 48, 64))
        cost = budget * (sum(layers) + 2) * (0.0012 + tokens * (width + 48) * 3.5e-8)
        if not seconds[0] < cost < seconds[1]:
            continue
        points.append(TextPoint(
            corpus=chance.choice(corpora), pieces=1000, encoder=encoder, decoder=decoder, encoder_layers=layers[0],
            decoder_layers=layers[1], width=width,
            rate=round(10 ** (chance.uniform(-2.7, -2.1) if kind else chance.uniform(-3.3, -1.7)), 5),
            warmup=budget // chance.choice((10, 5, 3)) if kind else chance.choice((0, budget // 10, budget // 3)),
            schedule=chance.choice(("linear", "inverse_sqrt", "inverse_sqrt", "constant")), updates=budget,
            tokens=tokens, dropout=chance.choice((0.0, 0.1)), clip=chance.choice((0.0, 1.0)),
            smoothing=chance.choice((0.0, 0.1)), optimizer="adam" if kind else chance.choice(("adam", "adam", "radam")),
            init="auto" if kind else chance.choice(("auto", "auto", "depth_scaled")), seed=chance.randrange(1000)))
    return points


def stream_trial(recipe: Recipe, data: PreparedData, fresh: Any, device: torch.device) -> dict[str, Any]:
    """Short training on the recipe's own stream, with its warm-up shortened."""
    engine = LocalEngine(fresh, recipe, device)
    stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
    warm = min(recipe.schedule.warmup, STREAM // 2)
    losses, norms = [], []
    for number in range(STREAM):
        indices = stream.plan(0)[number % stream.epoch_size(0)]
        reached = stream.split(0).trg_lengths[indices].cumsum()
        batch = collate(stream.split(0), indices[:max(2, int((reached <= TOKENS).sum()))], number, device)
        rate = recipe.optimizer.lr * min(1.0, (number + 1) / (warm + 1))
        stats = engine.train_step([batch], batch.tokens, rate)
        losses.append(stats.nll / batch.tokens)
        norms.append(stats.grad_norm)
    last = [plain_loss(fresh, each) for each in (batch, other_sources(batch))]
    result = measure_outcome(engine.evaluate, data.split("valid").truncated(recipe.model.max_length), 0.0, device)
    return {"losses": losses, "norms": norms, "last": last, "own": result.own, "shuffled": result.shuffled}


def run_point(point: TextPoint, folder: Path) -> Record:
    """Measures and trains one run."""
    recipe, device = point.recipe(folder), torch.device("cpu")
    data = PreparedData.open(recipe.data.folder)
    source, target = (vocab.size for vocab in data.vocabs())
    ranks = Ranks(0, 1, 0, 1, device)
    started, used = time.monotonic(), time.process_time()
    profile = profile_for(recipe, data, ranks)

    def fresh() -> Any:
        return fresh_model(recipe.model, source, target, recipe.seed, [], profile=profile,
                           label_smoothing=recipe.train.label_smoothing)

    batch = first_batch(recipe, data, TOKENS, device)
    features = {**static_features(fresh(), batch), **update_features(fresh(), batch, recipe)}
    streamed = stream_trial(recipe, data, fresh(), device)
    measured = time.monotonic() - started

    train, valid = data.split("train"), data.split("valid").truncated(recipe.model.max_length)
    frequencies = frequencies_loss(train, valid, target)
    model = fresh()
    engine = LocalEngine(model, recipe, device)
    stream = Stream(train, recipe.batch.tokens, recipe.seed)
    state, curve, marks, tokens = TrainState(), [], [], 0
    for done in updates(engine, stream, recipe, state, ranks):
        curve.append(done.nll / done.update.tokens)
        tokens += done.update.tokens
        at_mark = state.update in (point.updates // 4, point.updates // 2, point.updates)
        if at_mark or done.give_up:
            result = measure_outcome(engine.evaluate, valid, frequencies, device)
            marks.append({"update": state.update, "own": _finite(result.own), "shuffled": _finite(result.shuffled),
                          "outcome": "stuck" if done.give_up else result.outcome})
        if done.give_up or state.update == point.updates:
            break
    return {"point": asdict(point), "features": features,
            "stream": {name: [_finite(each) for each in value] if isinstance(value, list) else _finite(value)
                       for name, value in streamed.items()},
            "batch_tokens": batch.tokens, "update_tokens": tokens / max(1, len(curve)),
            "mean_target": float(train.trg_lengths.mean()), "mean_source": float(train.src_lengths.mean()),
            "pairs": len(train), "frequencies": frequencies, "even": math.log(target),
            "losses": [_finite(fmean(curve[at:at + INTERVAL])) for at in range(0, len(curve), INTERVAL)],
            "marks": marks, "ended": state.update == point.updates, "outcome": marks[-1]["outcome"],
            "measuring": round(measured, 1), "cpu": round(time.process_time() - used, 1), "seconds": round(time.monotonic() - started, 1)}


def _finite(value: float) -> float | None:
    return round(float(value), 5) if math.isfinite(value) else None


def run_points(points: Sequence[TextPoint], output: Path, folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Trains the points missing in the file whose number is `share[0]` modulo `share[1]`."""
    for number, point in enumerate(points):
        if number % share[1] != share[0]:
            continue
        done = {json.dumps(json.loads(line)["point"]) for line in output.read_text().splitlines()} \
            if output.exists() else set()
        if json.dumps(asdict(point)) in done:
            continue
        record = run_point(point, folder)
        with output.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(number, point.corpus, point.encoder, point.decoder, f"{point.encoder_layers}L-{point.decoder_layers}L",
              f"d {point.width}, {point.tokens} tokens, {point.updates} updates, rate {point.rate}, warm-up "
              f"{point.warmup}: {record['outcome']}",
              [round((m['shuffled'] or 0) - (m['own'] or 0), 3) for m in record["marks"]],
              f"{record['measuring']} + {record['seconds'] - record['measuring']:.0f} s", flush=True)
