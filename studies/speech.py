"""Spoken digits, said by espeak-ng: a set, a model, and its word error rates on new sentences and on a held-out voice.

The set is the same wherever the same espeak-ng runs. The model is prepared, trained, averaged and scored by the
commands that a user would type, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import yaml

from deepnmt.cli import main
from deepnmt.config import override
from deepnmt.errors import UserError
from deepnmt.files import write_text
from deepnmt.progress import print_status

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("en-us+m1", "en-us+m3", "en-us+f1", "en-gb+m2", "en-gb+f2", "en-gb+f4", "en-gb-scotland+m7", "en-us+f5")
HELD_OUT = "en-gb+m4"
SPEEDS = (130, 150, 170, 190)  # words a minute
RATE = 22_050  # of espeak-ng's files
LONGEST = 5  # digits of a sentence
# Utterances of each list. Sentences of the tests have three digits or more, and none of them is in the training.
SIZES = {"train": 2000, "valid": 60, "sentences": 150, "voice": 150}

RECIPE = {
    "task": "speech", "seed": 1, "average_last": 5,
    "data": {"sample_rate": RATE, "max_frames": 500, "max_tokens": 60},
    "vocab": {"kind": "bpe", "size": 32},
    "spec_augment": {"bands": 1, "band_width": 10, "stretches": 1, "stretch_length": 8},
    "batch": {"tokens": 4000},
    "model": {"width": 96, "heads": 4, "ffn": 192, "channels": 96, "dropout": 0.1, "max_length": 128,
              "encoder": {"block": "pre_ln", "layers": 4}, "decoder": {"block": "pre_ln", "layers": 2}},
    "optimizer": {"lr": 2.0e-3},
    "schedule": {"name": "inverse_sqrt", "warmup": 200},
    "train": {"updates": 3000, "log_every": 50, "validate_every": 250, "save_every": 50, "keep_last": 5,
              "label_smoothing": 0.1, "valid_sentences": 60, "clip": 1.0},
    "translate": {"beam": 4, "max_ratio": 1.0},
    "parallel": {"ds_config": None, "threads": 1},
}


def sentences(count: int, seed: int, shortest: int, without: frozenset[str] = frozenset()) -> list[str]:
    """`count` sequences of digits in words, none of which is in `without`."""
    draw, made = random.Random(seed), list[str]()
    while len(made) < count:
        sentence = " ".join(draw.choice(DIGITS) for _ in range(draw.randint(shortest, LONGEST)))
        if sentence not in without:
            made.append(sentence)
    return made


def make_set(folder: Path, sizes: dict[str, int]) -> None:
    """Writes the lists and their audio files, unless they are there. Raises `UserError` without espeak-ng."""
    if not shutil.which("espeak-ng"):
        raise UserError("the digits are said by espeak-ng, which is not installed; apt-get install espeak-ng")
    train = sentences(sizes["train"], 1, 1)
    said = {"train": train}
    for seed, name in enumerate(("valid", "sentences", "voice"), start=2):
        said[name] = sentences(sizes[name], seed, 3, frozenset(train))
    for name, lines in said.items():
        if (folder / f"{name}.tsv").is_file():
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows = []
        for number, line in enumerate(lines):
            voice = HELD_OUT if name == "voice" else VOICES[number % len(VOICES)]
            speed = SPEEDS[number // len(VOICES) % len(SPEEDS)]
            file = Path(name, f"{number:05d}.wav")
            subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-w", folder / file, line], check=True)
            rows.append(f"{file}\t{line}\n")
        write_text(folder / f"{name}.tsv", "".join(rows))
        print_status(f"{name}: {len(lines)} utterances")


def write_recipe(folder: Path, settings: list[str]) -> Path:
    """Writes the recipe of the study, with these settings changed, and returns its file."""
    tree = json.loads(json.dumps(RECIPE))
    tree["run"] = str(folder / "run")
    tree["data"] |= {"folder": str(folder / "prepared"), "train": str(folder / "train.tsv"),
                     "valid": str(folder / "valid.tsv"),
                     "test": {name: str(folder / f"{name}.tsv") for name in ("sentences", "voice")}}
    for setting in settings:
        override(tree, setting)
    write_text(folder / "recipe.yaml", yaml.safe_dump(tree, sort_keys=False))
    return folder / "recipe.yaml"


def run_study(folder: Path, settings: list[str], sizes: dict[str, int] = SIZES) -> str:
    """Makes the set, trains, averages and scores; returns the table. What is done already is not done again."""
    folder.mkdir(parents=True, exist_ok=True)
    make_set(folder, sizes)
    recipe = write_recipe(folder, settings)
    run = folder / "run"
    for command, given in (("prepare", recipe), ("train", recipe), ("average", run), ("evaluate", run)):
        if code := main(command, [str(given)]):
            raise UserError(f"deepnmt {command} ended with {code}, and has said why; the same command goes on from "
                            "there")
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    lines = ["| test set | utterances | WER % | CER % |", "|---|---|---|---|"]
    for name, row in scores["sets"].items():
        lines.append(f"| {name} | {row['sentences']} | {row['wer']:.1f} | {row['cer']:.1f} |")
    return "\n".join(lines)
