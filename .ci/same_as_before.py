"""Checks that two commits compute the same: python .ci/same_as_before.py OLD_CHECKOUT [NEW_CHECKOUT]

Both checkouts run the same commands at the same time on this machine, with one thread per process. Only the command
line is used, so the code inside may have changed. The results must be equal bit for bit: texts, token arrays,
vocabularies, losses, gradient norms, parameter names, weights, moments, averages, scores, translations and the figures
that commands print. Not compared are times, versions, hashes of files that contain them, the words of messages, and
recipes, which may have new settings. Each row is `equal` or the first difference; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

RECIPE = """
run: {folder}/run
seed: 7
data:
  folder: {folder}/bpe
  src_lang: en
  trg_lang: de
  train: {{src: {folder}/text/train.en, trg: {folder}/text/train.de}}
  valid: {{src: {folder}/text/valid.en, trg: {folder}/text/valid.de}}
  test: {{held_out: {{src: {folder}/text/test.en, trg: {folder}/text/test.de}}}}
  filters: {{max_tokens: 60}}
  workers: 1
vocab: {{size: 300}}
batch: {{tokens: 256}}
model:
  width: 16
  heads: 2
  ffn: 32
  dropout: 0.1
  max_length: 64
  encoder: {{block: admin, layers: 3}}
  decoder: {{block: admin, layers: 2}}
admin: {{tokens: 512}}
optimizer: {{lr: 5.0e-3}}
schedule: {{warmup: 4}}
train: {{updates: 12, clip: 1.0, log_every: 1, validate_every: 6, save_every: 4, valid_sentences: 8}}
parallel: {{threads: 1}}
translate: {{beam: 4, nbest: 2, max_extra: 5}}
average_last: 2
"""
# JSON keys of times, versions, and of hashes and sizes of files that contain them; and sums that changed their place
UNCOMPARED_KEYS = re.compile(r".*(second|time|version|sha256|fingerprint|hash).*|deepnmt|grammar|files|bytes|alignment")
_HASH = re.compile("[0-9a-f]{64}")  # the files themselves are compared
UNCOMPARED_FILES = {".yaml", ".png", ".html", ".log"}  # recipes and pictures: only their existence is checked


@dataclass(frozen=True)
class Step:
    """A command of deepnmt: its number of processes and its words, in which {folder} stands for the side's folder."""

    processes: int
    words: str


@dataclass(frozen=True)
class Side:
    """One of the two checkouts, and the folder its commands write into."""

    checkout: Path
    folder: Path
    python: str

    def run(self, step: Step) -> str:
        """The output of the command. Raises `RuntimeError` with the end of its messages if it fails."""
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [self.python, "-m", "deepnmt", *step.words.format(folder=self.folder).split()]
        with tempfile.TemporaryFile("w+") as errors:
            ranks = []
            for rank in range(step.processes):
                if step.processes > 1:
                    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(step.processes),
                            "LOCAL_WORLD_SIZE": str(step.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                ranks.append(subprocess.Popen(command, cwd=self.checkout, env=env, text=True,
                                              stdout=subprocess.PIPE, stderr=errors))
            outputs = [rank.communicate()[0] for rank in ranks]
            codes = [rank.returncode for rank in ranks]
            if any(codes):
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command[2:4])}: exit codes {codes}: {errors.read()[-600:].strip()}")
        return outputs[0]


def layout_cases() -> Iterator[tuple[str, list[Step]]]:
    """Each layout in each precision: trained to update 8, resumed, trained to 12."""
    for layout, processes, config, stages in (("local", 1, "", 0), ("one process", 1, "zero0", 0),
                                              ("ZeRO-1 x 2", 2, "zero1", 0), ("ZeRO-3 x 2", 2, "zero3", 0),
                                              ("pipeline x 2", 2, "pipeline_zero1", 2)):
        for precision in ("fp32", "bf16", "fp16") if config else ("fp32",):
            case = f"{layout}, {precision}"
            run = "{folder}/" + re.sub(r"\W+", "-", case)
            words = f"{{folder}}/recipe.yaml run={run} parallel.pipeline_stages={stages} batch.accumulation=2"
            words += f" parallel.ds_config=ds_configs/{config}_{precision}.json" if config else ""
            if precision == "fp32":  # a decay that spares norms and biases must tell them from a share of a matrix
                words += " optimizer.name=adamw optimizer.weight_decay=0.1 optimizer.decay_norms_and_biases=false"
            steps = [Step(1, f"train {words} --dry-run"), Step(processes, f"train {words} train.updates=8"),
                     Step(processes, f"train {words}")]
            if precision == "fp32":
                steps += [Step(1, f"average {run}"), *translations(run, 1 if stages else processes),
                          Step(1, f"fold {run}")]
            yield case, steps


# Every block once, each with settings that the layouts do not vary.
BLOCKS = {
    "post_ln": "optimizer.name=sgd optimizer.momentum=0.9 optimizer.lr=0.1 optimizer.betas=[0.9,0.98]",
    "pre_ln": "optimizer.name=adamw optimizer.weight_decay=0.1 optimizer.decay_norms_and_biases=false",
    "admin": "admin.input_variance=one model.attention_dropout=0.1 model.activation_dropout=0.1",
    "admin_closed_form": "schedule.name=linear schedule.final=0.0001 train.label_smoothing=0.2",
    "b2t": "model.activation=gelu parallel.recompute_layers=2",
    "b2t_no_ln": "schedule.name=step schedule.step_update=6 train.clip=0",
    "deepnorm": "translate.length_penalty=gnmt translate.alpha=0.6 translate.patience=1",
    "rezero": "optimizer.name=radam model.decoder.block=rezero_post_ln",
    "rezero_post_ln": "train.best_by=bleu train.keep_last=2 translate.method=sample translate.temperature=0.7",
    "fixup": "model.tied=none translate.method=greedy translate.nbest=1",
    "t_fixup": "data.folder={folder}/unigram vocab.kind=unigram data.subword_variants=2 train.epochs=2",
    "looks_linear": "data.folder={folder}/separate vocab.shared=false model.tied=decoder",
    "dlcl": "model.encoder.init=depth_scaled model.decoder.init=xavier_separate",
    "dlcl_post": "translate.length_penalty=none translate.precision=bf16 model.encoder.input_gain=true",
}


def block_cases() -> Iterator[tuple[str, list[Step]]]:
    for block, settings in BLOCKS.items():
        run = f"{{folder}}/block-{block}"
        words = f"{{folder}}/recipe.yaml run={run} model.encoder.block={block} model.decoder.block={block} {settings}"
        yield f"block {block}", [Step(1, f"train {words} --dry-run"), Step(1, f"train {words}"),
                                 Step(1, f"average {run}"), *translations(run, 1)]


def translations(run: str, processes: int) -> list[Step]:
    """Steps that translate the test text, each hypothesis with its score, and evaluate the test set."""
    return [Step(processes, f"translate {run} --input {{folder}}/text/test.en --output {run}/out.jsonl --format jsonl"),
            Step(processes, f"evaluate {run} translate.nbest=1 --output {run}/scores.json")]


def all_cases() -> Iterator[tuple[str, list[Step]]]:
    recipe = "{folder}/recipe.yaml"
    yield "corpus and demo", [Step(1, f"demo {recipe} --pairs 600 run={{folder}}/demo data.folder={{folder}}/demo-data "
                                      "parallel.ds_config=ds_configs/zero1_fp32.json translate.nbest=1")]
    yield "prepare", [Step(1, f"prepare {recipe} data.folder={{folder}}/{folder} {words}") for folder, words in (
        ("bpe", ""), ("unigram", "vocab.kind=unigram data.subword_variants=2"),
        ("separate", "vocab.shared=false model.tied=decoder"))]
    yield "profile", [Step(n, f"profile {recipe} run={{folder}}/profile-{n}") for n in (1, 2)]
    yield from layout_cases()
    yield from block_cases()
    yield "diagnose", [Step(1, "diagnose {folder}/block-admin --output {folder}/diagnosis")]


def run_case(side: Side, steps: list[Step]) -> list[str]:
    """The output of each command, without the side's folder and times."""
    outputs = []
    for step in steps:
        output = side.run(step).replace(str(side.folder), "FOLDER")
        if "--dry-run" in step.words:  # the resolved recipe above its figures may have more settings
            output = "\n".join(line for line in output.splitlines() if line.startswith("#"))
        outputs.append(output)
    return outputs


def first_difference(old: Path, new: Path, seen: set[str]) -> str | None:
    """Between the files that a case has written; `seen` are those of cases before, and grows."""
    names = {str(file.relative_to(side)) for side in (old, new) for file in side.rglob("*") if file.is_file()}
    names = {name for name in names - seen if not re.search(r"(^|/)\.|tensorboard/", name)}
    seen |= names
    for name in sorted(names):
        for side, other in ((old, "new"), (new, "old")):
            if not (side / name).exists():
                return f"only the {other} one writes {name}"
        if fault := differs(old / name, new / name, (str(old), str(new))):
            return f"{name}: {fault}"
    return None


def differs(old: Path, new: Path, folders: tuple[str, str]) -> str | None:
    """How two files of one name differ, or None."""
    if old.suffix in UNCOMPARED_FILES:
        return None
    if old.suffix == ".safetensors":
        a, b = load_file(old), load_file(new)
        if a.keys() != b.keys():
            return f"tensors on one side only: {', '.join(sorted(a.keys() ^ b.keys())[:4])}"
        unlike = [name for name in a if a[name].shape != b[name].shape or a[name].tobytes() != b[name].tobytes()]
        return f"{len(unlike)} of {len(a)} tensors differ, {unlike[0]} among them" if unlike else None
    if old.suffix in (".json", ".jsonl"):
        texts = [file.read_text().replace(folder, "FOLDER") for file, folder in zip((old, new), folders, strict=True)]
        if old.suffix == ".jsonl":  # a checkpoint is logged when its thread has written it, between any two updates
            texts = ["\n".join(line for line in text.splitlines()
                               if '"type": "checkpoint"' not in line and '"type": "look"' not in line)
                     for text in texts]
        as_list = [f"[{','.join(text.splitlines())}]" if old.suffix == ".jsonl" else text for text in texts]
        return next(unequal(*map(json.loads, as_list)), None)
    return None if old.read_bytes() == new.read_bytes() else "other bytes"


def figures(text: str) -> list[str]:
    """The numbers in a text, but for seconds."""
    return re.findall(r"\d[\d.,]*(?:e[+-]?\d+)?", re.sub(r"[\d.]+ s\b", "", text))


def unequal(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two JSON values differ, but for times, versions and hashes of what holds them."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a):  # what the newer one has beyond is new
            if not UNCOMPARED_KEYS.fullmatch(key):
                yield from unequal(a[key], b.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from unequal(*pair, f"{where}[{index}]")
    elif isinstance(a, str) and isinstance(b, str) and " " in a + b:  # a sentence, whose words may change
        if figures(a) != figures(b):
            yield f"{where} was {a[:80]!r}, is {b[:80]!r}"
    elif a != b and not (_HASH.fullmatch(str(a)) and _HASH.fullmatch(str(b))):
        yield f"{where} was {str(a)[:80]!r}, is {str(b)[:80]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parents[1],
                        help="a checkout of the newer one (default: the one of this file)")
    parser.add_argument("--python", default=sys.executable, help="which interpreter (default: this one)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression; corpus and data are made "
                        "anyway")
    args = parser.parse_args()
    different, seen = 0, set[str]()
    with tempfile.TemporaryDirectory(prefix="same-") as folder, ThreadPoolExecutor(2) as both:
        sides = [Side(checkout.resolve(), Path(folder, name), args.python)
                 for name, checkout in (("old", args.old), ("new", args.new))]
        for side in sides:
            side.folder.mkdir()
            (side.folder / "recipe.yaml").write_text(RECIPE.format(folder=side.folder))
        for case, steps in all_cases():
            if not re.search(args.only, case) and case not in ("corpus and demo", "prepare"):
                continue
            started, fault = time.monotonic(), None
            try:
                old, new = both.map(run_case, sides, [steps, steps])
                fault = first_difference(sides[0].folder, sides[1].folder, seen)
                fault = fault or next((f"{step.words.split()[0]} prints\n{a}\ninstead of\n{b}"
                                       for step, a, b in zip(steps, new, old, strict=True)
                                       if figures(a) != figures(b)), None)
            except RuntimeError as error:
                fault = str(error)
                if "has no fp16" in fault:  # both commits reject what this CPU cannot compute
                    print(f"{case:<24} {'-':>5}    left out: this CPU has no fp16", flush=True)
                    continue
            different += fault is not None
            print(f"{case:<24} {time.monotonic() - started:5.0f} s  {fault or 'equal'}", flush=True)
    print("everything is equal" if not different else f"{different} cases differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
