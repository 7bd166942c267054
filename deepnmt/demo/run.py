"""The demo, step by step: a corpus made here, vocabulary and arrays, Admin profile and training under `deepspeed`,
averaging, translation of sentences never seen, scores. Each step reuses what an earlier attempt left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deepnmt.checkpoint.average import average_run
from deepnmt.checkpoint.checkpoint import list_checkpoints, load_state
from deepnmt.config import Recipe, changed_settings, dump_recipe, load_recipe
from deepnmt.data.prepare import prepare
from deepnmt.decode.translate import translate_files
from deepnmt.demo.corpus import make_corpus
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import evaluate_run
from deepnmt.parallel.launch import free_port
from deepnmt.train.log import clock

_MAIN = Path(__file__).resolve().parents[1] / "__main__.py"


def walk(recipe: Recipe, pairs: int = 110_000, number_of_processes: int = 2) -> int:
    """Runs every step and returns the exit code.

    Args:
        recipe: whose training text is two files in one folder, `train.en` and `train.de`, written here.
        pairs: of training text; validation and test text have a tenth of that, but at most 500 and 1,000.

    Raises:
        UserError: another recipe; `pairs` below 10; or see the steps.
    """
    started = time.monotonic()
    if [Path(file).name for file in (*recipe.data.train.src, *recipe.data.train.trg)] != ["train.en", "train.de"]:
        raise UserError("the demo writes its own texts, train.en and train.de, but data.train names others; give "
                        "recipes/demo/admin_18l-18l.yaml or a copy of it")
    if pairs < 10:
        raise UserError(f"--pairs is {pairs}, must be 10 or more")
    run, texts = Path(recipe.run), Path(recipe.data.train.src[0]).parent
    steps: list[tuple[str, Callable[[], object]]] = [
        ("writing the corpus",
         lambda: make_corpus(texts, pairs, valid=min(500, pairs // 10), test=min(1000, pairs // 10))),
        ("preparing the data", lambda: prepare(recipe)),
        (f"profiling Admin and training on {number_of_processes} processes",
         lambda: _train(recipe, number_of_processes)),
        ("averaging the last checkpoints", lambda: average_run(recipe)),
        ("translating and scoring the test set", lambda: _score(recipe, run)),
    ]
    for number, (title, step) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {title}", file=sys.stderr, flush=True)
        step()
    _show(recipe, run, texts)
    print(f"the demo took {clock(time.monotonic() - started)}; everything is in {run}/", file=sys.stderr)
    return 0


def _train(recipe: Recipe, count: int) -> None:
    """Starts `deepnmt train` under the launcher unless the run is finished.

    Raises:
        UserError: it was finished with other settings, or training fails.
    """
    status = Path(recipe.run) / "STATUS.json"
    if status.is_file():
        found = json.loads(status.read_text(encoding="utf-8"))
        if found["status"] == "finished" and found["update"] >= recipe.train.updates:
            require_same(load_recipe(recipe.run), recipe)
            print(f"      {recipe.run} was trained before; it is reused", file=sys.stderr)
            return
    Path(recipe.run).mkdir(parents=True, exist_ok=True)
    resolved = Path(recipe.run) / "demo.yaml"
    resolved.write_text(dump_recipe(recipe), encoding="utf-8")
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [str(launcher), "--quiet", "--num_accelerators", str(count), "--master_port", str(free_port()),
               str(_MAIN), "train", str(resolved)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"}
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        raise UserError(f"training ended with code {code}, see above; the same command goes on from the newest "
                        "checkpoint")


def require_same(trained: Recipe, recipe: Recipe) -> None:
    """Raises `UserError` where a finished run had other settings, but for those that change no model and no checkpoint,
    or that later steps may change."""
    free = ("run:", "data.workers:", "average_last:", "translate.", "parallel.threads:", "parallel.recompute_layers:",
            "train.log_every:", "train.probe_every:")
    if changes := [change for change in changed_settings(trained, recipe) if not change.startswith(free)]:
        raise UserError(f"{recipe.run} is finished, but was trained with other settings:\n  " + "\n  ".join(changes)
                        + "\nput them back, say make demo-clean to start over, or give another folder with run=FOLDER")


def _score(recipe: Recipe, run: Path) -> None:
    """Scores the averaged model unless that was done."""
    scores = run / "scores.json"
    if is_scored(recipe, scores):
        print(f"      {scores} is up to date", file=sys.stderr)
        return
    evaluate_run(recipe, output=scores)


def is_scored(recipe: Recipe, scores: Path) -> bool:
    """Whether a file holds the scores of this average, made since the last checkpoint, by the recipe's search."""
    run = Path(recipe.run)
    newest = max(path.stat().st_mtime for path in list_checkpoints(run / "checkpoints"))
    if not scores.is_file() or scores.stat().st_mtime <= newest:
        return False
    found = json.loads(scores.read_text(encoding="utf-8"))
    due = {"averaged_updates": load_state(run / "averaged").extra["averaged_updates"],
           "translate": recipe.translate.model_dump()}
    return set(found.get("sets", ())) == set(recipe.data.test) and {key: found.get(key) for key in due} == due


def _show(recipe: Recipe, run: Path, texts: Path) -> None:
    """A few translations and the scores."""
    lines = [(texts / f"test.{lang}").read_text(encoding="utf-8").splitlines()[:3] for lang in ("en", "de")]
    sample, output = run / "sample.en", run / "sample.de"
    sample.write_text("".join(f"{line}\n" for line in lines[0]), encoding="utf-8")
    translate_files(run, str(sample), str(output), recipe.translate)
    for source, reference, ours in zip(*lines, output.read_text(encoding="utf-8").splitlines(), strict=True):
        print(f"\n  English    {source}\n  deepnmt    {ours}\n  reference  {reference}")
    for name, scores in json.loads((run / "scores.json").read_text(encoding="utf-8"))["sets"].items():
        print(f"\n  BLEU {scores['bleu']:.1f}  ({scores['bleu_signature']})\n  chrF {scores['chrf']:.1f}  "
              f"({scores['chrf_signature']})" + (f"\n  on {name}" if len(recipe.data.test) > 1 else ""))
