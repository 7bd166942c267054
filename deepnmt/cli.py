"""Every command line of deepnmt. One function a command; torch is imported only once arguments hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepnmt.config import Recipe, load_recipe
from deepnmt.errors import UserError

Arguments = argparse.Namespace


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Runs `command` (or the first argument) and returns the exit code: 0, 2 for a user's mistake, or the command's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [w for w in words if not w.startswith(("--local_rank", "--local-rank"))]  # launchers add it; we read RANK
    if command is None:
        if not words or words[0] in ("-h", "--help") or words[0] not in COMMANDS:
            print("usage: deepnmt COMMAND ...\n\n" + "\n".join(f"  {n:<12}{c.__doc__}" for n, c in COMMANDS.items())
                  + "\n\ndeepnmt COMMAND --help says more.")
            return 0 if words and words[0] in ("-h", "--help") else 2
        command, words = words[0], words[1:]
    try:
        return COMMANDS[command](words)
    except UserError as error:
        print(f"deepnmt: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        return 0


def _parser(command: str, text: str, example: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"deepnmt {command}", description=text, epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )


def _recipe_parser(command: str, text: str, example: str) -> argparse.ArgumentParser:
    parser = _parser(command, text, example)
    parser.add_argument("recipe", help="a recipe file, or the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings to change, for example "
                        "model.encoder.layers=18 train.updates=300")
    return parser


def _load(found: Arguments) -> Recipe:
    return load_recipe(found.recipe, found.overrides)


def _prepare(words: list[str]) -> int:
    """Filter and segment a corpus into a data folder."""
    parser = _recipe_parser("prepare", "Trains the vocabulary, filters the training text and writes token arrays into "
                            "the recipe's data.folder. A folder that is up to date is left as it is.",
                            "python tools/prepare_data.py recipes/demo/admin_18l-18l.yaml vocab.size=2000")
    recipe = _load(parser.parse_args(words))
    from deepnmt.prepare import prepare

    print(prepare(recipe))
    return 0


def _profile(words: list[str]) -> int:
    """Measure Admin's omega on the first batch."""
    parser = _recipe_parser("profile", "Profiles an Admin model layer by layer and writes admin_profile.json and .png "
                            "into the run folder. Runs alone or on several processes under a launcher.",
                            "deepspeed --num_accelerators 2 tools/profile_admin.py recipes/demo/admin_18l-18l.yaml")
    recipe = _load(parser.parse_args(words))
    from deepnmt.parallel.launch import processes
    from deepnmt.profile import profile

    with processes(recipe.parallel.threads) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)
    return 0


def _train(words: list[str]) -> int:
    """Train a recipe, or go on with a run."""
    parser = _recipe_parser("train", "Trains a recipe into its run folder. Started again, it goes on where it was. "
                            "Runs alone, or on several processes under deepspeed, torchrun or srun.",
                            "deepspeed --num_accelerators 2 tools/train.py recipes/demo/admin_18l-18l.yaml train.updates=300")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, sizes and layout; train nothing")
    found = parser.parse_args(words)
    recipe = _load(found)
    from deepnmt.parallel.launch import processes

    if found.dry_run:
        from deepnmt.dry_run import describe

        print(describe(recipe))
        return 0
    from deepnmt.train import train

    with processes(recipe.parallel.threads, group=recipe.parallel.ds_config is not None) as ranks:
        return train(recipe, ranks)


def _average(words: list[str]) -> int:
    """Average a run's checkpoints."""
    parser = _recipe_parser("average", "Averages checkpoints of a run into RUN/averaged (or --output). Default: the last "
                            "average_last of the recipe.", "python tools/average_checkpoints.py runs/demo --last 5")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--last", type=int, metavar="N", help="the last N")
    group.add_argument("--best", type=int, metavar="N", help="the N with the best validation")
    group.add_argument("--updates", metavar="U,U,...", help="these updates")
    group.add_argument("--range", metavar="FROM:TO", help="all from update FROM to update TO")
    group.add_argument("--checkpoints", nargs="+", metavar="FOLDER", help="these folders, of any runs of one model")
    parser.add_argument("--output", metavar="FOLDER", help="where the average goes (default: RUN/averaged)")
    found = parser.parse_intermixed_args(words)
    recipe = _load(found)
    from deepnmt.average import average_run

    print(average_run(recipe, last=found.last, best=found.best, updates=_numbers(found.updates),
                      span=_span(found.range), folders=found.checkpoints, output=found.output))
    return 0


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise UserError(f"--updates {text!r} must be numbers with commas between, for example 800,900,1000") from None


def _span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        low, high = (int(n) for n in text.split(":"))
    except ValueError:
        raise UserError(f"--range {text!r} must be FROM:TO, for example 800:1000") from None
    return low, high


def _translate(words: list[str]) -> int:
    """Translate text with a trained model."""
    parser = _recipe_parser("translate", "Translates lines of a file or of standard input; one line out for each line in. "
                            "Search settings are the recipe's translate section.",
                            "python tools/translate.py runs/demo --input in.en --output out.de translate.beam=5")
    parser.add_argument("--input", default="-", metavar="FILE", help="text, one sentence a line (.gz too); - standard input")
    parser.add_argument("--output", default="-", metavar="FILE", help="where translations go; - standard output")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="a checkpoint (default: the run's average, else the newest)")
    found = parser.parse_intermixed_args(words)
    recipe = _load(found)
    from deepnmt.parallel.launch import processes
    from deepnmt.translate import translate_files

    with processes(recipe.parallel.threads) as ranks:
        translate_files(Path(found.checkpoint or recipe.run), found.input, found.output, recipe.translate,
                        seed=recipe.seed, rank=ranks.rank, world=ranks.world, gather=ranks.gather_bytes)
    return 0


def _evaluate(words: list[str]) -> int:
    """Score translations with SacreBLEU."""
    parser = _recipe_parser("evaluate", "Translates and scores the recipe's test sets (or --test), or scores ready "
                            "translations (--hypotheses), with SacreBLEU: BLEU, chrF, TER, signatures, a table, JSON.",
                            "python tools/evaluate.py runs/demo --test test")
    parser.add_argument("--test", action="append", metavar="NAME", help="a test set: a name of data.test, NAME=SRC,REF files, "
                        "or SacreBLEU's name such as wmt14/full; may be given several times")
    parser.add_argument("--hypotheses", action="append", metavar="SYSTEM=FILE[,FILE...]", help="score these translations of the "
                        "test sets (one file a set) instead of translating; two systems are compared by paired bootstrap")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="a checkpoint (default: the run's average, else the newest)")
    parser.add_argument("--output", metavar="FILE", help="JSON file (default: RUN/scores.json)")
    found = parser.parse_intermixed_args(words)
    recipe = _load(found)
    from deepnmt.evaluate import evaluate_run

    print(evaluate_run(recipe, tests=found.test, hypotheses=found.hypotheses, checkpoint=found.checkpoint,
                       output=found.output))
    return 0


def _benchmark(words: list[str]) -> int:
    """Time training and translation against a plain loop."""
    parser = _recipe_parser("benchmark", "Target tokens/s of the training loop against a plain loop over "
                            "torch.nn.Transformer of the same shape on the same batches; sentences/s of translation.",
                            "python tools/benchmark.py recipes/multi30k/de-en_4l-4l.yaml batch.tokens=2048 "
                            "--translate runs/multi30k_de-en")
    parser.add_argument("--updates", type=int, default=20, metavar="N", help="timed updates a round (default 20)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--translate", metavar="RUN", help="a trained run whose first test set is translated")
    parser.add_argument("--output", default="runs/benchmark.json", metavar="FILE", help="JSON file")
    found = parser.parse_intermixed_args(words)
    recipe = _load(found)
    from deepnmt.benchmark import benchmark, save

    figures = benchmark(recipe, found.updates, found.rounds, Path(found.translate) if found.translate else None)
    save(figures, Path(found.output))
    return 0


def _demo(words: list[str]) -> int:
    """The whole path on a corpus made here."""
    parser = _recipe_parser("demo", "Writes the demo corpus, prepares it, trains under deepspeed on two processes, averages, "
                            "translates and scores. What is there already is reused.",
                            "python tools/demo.py recipes/demo/admin_18l-18l.yaml")
    recipe = _load(parser.parse_args(words))
    from deepnmt.walkthrough import walk

    return walk(recipe)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "prepare": _prepare,
    "profile": _profile,
    "train": _train,
    "average": _average,
    "translate": _translate,
    "evaluate": _evaluate,
    "benchmark": _benchmark,
    "demo": _demo,
}


def entry() -> None:
    """The console script."""
    sys.exit(main())
