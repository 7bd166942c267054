"""The demo: writes a corpus, prepares it, profiles and trains an Admin model under `deepspeed`, averages checkpoints,
translates and scores unseen sentences. Each step reuses the results of an earlier attempt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from deepnmt.checkpoint.average import average_run
from deepnmt.checkpoint.checkpoint import list_checkpoints, load_state
from deepnmt.config import Recipe, changed_settings, dump_recipe, load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.decode.translate import translate_files
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import evaluate_run
from deepnmt.extras.demo.corpus import make_corpus
from deepnmt.processes.process_group import free_port
from deepnmt.progress import print_status
from deepnmt.training.reporters import clock
from deepnmt.version import PACKAGE

_MAIN = PACKAGE.resolve() / "__main__.py"


def run_demo(recipe: Recipe, pairs: int) -> None:
    """Runs every step.

    Args:
        recipe: its training text must be two files in one folder, `train.en` and `train.de`; the demo writes them.
        pairs: of training text; validation and test text have a tenth of that, but at most 500 and 1,000.

    Raises:
        UserError: the recipe has another training text; `pairs` is below 10; or a step raises it.
    """
    started = time.monotonic()
    if recipe.task != "translation" or (
            [Path(file).name for file in (*recipe.data.train.src, *recipe.data.train.trg)] != ["train.en", "train.de"]):
        raise UserError("the demo writes its own texts, train.en and train.de, but data.train names others; use "
                        "demo/admin_18l-18l or a copy of it")
    if pairs < 10:
        raise UserError(f"--pairs is {pairs}, must be 10 or more")
    run = Path(recipe.run)
    texts = Path(recipe.data.train.src[0]).parent
    scores_file = run / "scores.json"

    print_status("[1/5] writing the corpus")
    make_corpus(texts, pairs, valid=min(500, pairs // 10), test=min(1000, pairs // 10))
    print_status("[2/5] preparing the data")
    prepare(recipe)
    print_status("[3/5] profiling Admin and training on 2 processes")
    train_on_all(recipe)
    print_status("[4/5] averaging the last checkpoints")
    average_run(recipe)
    print_status("[5/5] translating and scoring the test set")
    if is_scored(recipe, scores_file):
        print_status(f"      {scores_file} is up to date")
    else:
        evaluate_run(recipe, output=scores_file)

    sources = (texts / "test.en").read_text(encoding="utf-8").splitlines()[:3]
    references = (texts / "test.de").read_text(encoding="utf-8").splitlines()[:3]
    sample, output = run / "sample.en", run / "sample.de"
    sample.write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    translate_files(run, str(sample), str(output), recipe.translate)
    translations = output.read_text(encoding="utf-8").splitlines()
    for source, reference, translation in zip(sources, references, translations, strict=True):
        print(f"\n  English    {source}\n  deepnmt    {translation}\n  reference  {reference}")
    for name, scores in json.loads(scores_file.read_text(encoding="utf-8"))["sets"].items():
        print(f"\n  BLEU {scores['bleu']:.1f}  ({scores['bleu_signature']})\n  chrF {scores['chrf']:.1f}  "
              f"({scores['chrf_signature']})")
        if len(recipe.data.test) > 1:
            print(f"  on {name}")
    print_status(f"the demo took {clock(time.monotonic() - started)}; everything is in {run}/")


def train_on_all(recipe: Recipe) -> None:
    """Runs `deepnmt train` under the launcher, on two processes, unless the run is finished.

    Raises:
        UserError: the run was finished with other settings, or training fails.
    """
    run = Path(recipe.run)
    status = {}
    if (run / "STATUS.json").is_file():
        status = json.loads((run / "STATUS.json").read_bytes())
    if status.get("status") == "finished" and status["update"] >= recipe.train.updates:
        require_same_settings(load_recipe(recipe.run), recipe)
        print_status(f"      {recipe.run} is trained already and reused")
        return
    run.mkdir(parents=True, exist_ok=True)
    (run / "demo.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--num_accelerators", "2",
               "--master_port", str(free_port()), _MAIN, "train", run / "demo.yaml"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    code = subprocess.run(list(map(str, command)), env=env, check=False).returncode
    if code:
        raise UserError(f"training ended with code {code}, see above; the same command resumes from the newest "
                        "checkpoint")


def require_same_settings(trained: Recipe, recipe: Recipe) -> None:
    """Raises `UserError` if a finished run had other settings. Not compared: settings that do not affect the trained
    model, or that later steps may change."""
    free = ("run", "data.workers", "average_last", "parallel.threads", "parallel.recompute_layers", "train.log_every",
            "train.probe_every")
    changes = []
    for change in changed_settings(trained, recipe):
        if change.key not in free and not change.key.startswith("translate."):
            changes.append(str(change))
    if changes:
        raise UserError(f"{recipe.run} is finished, but was trained with other settings:\n  " + "\n  ".join(changes)
                        + f"\nrestore them, remove {recipe.run} to start over, or set another folder with run=FOLDER")


def is_scored(recipe: Recipe, scores: Path) -> bool:
    """Whether the file has scores of the current average, with the recipe's search settings."""
    run = Path(recipe.run)
    newest = max(path.stat().st_mtime for path in list_checkpoints(run / "checkpoints"))
    if not scores.is_file() or scores.stat().st_mtime <= newest:
        return False
    record = json.loads(scores.read_text(encoding="utf-8"))
    if set(record.get("sets", ())) != set(recipe.data.test):
        return False
    averaged = load_state(run / "averaged").extra["averaged_updates"]
    return record.get("averaged_updates") == averaged and record.get("translate") == recipe.translate.model_dump()
