"""Every command line of deepnmt, one function a command. torch is imported only once the arguments hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepnmt.config import Recipe, load_recipe
from deepnmt.errors import UserError


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Runs `command`, or the one the first argument names; returns the exit code: 0, 2 for a user's mistake, or the
    command's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [w for w in words if not w.startswith(("--local_rank", "--local-rank"))]  # launchers add it; RANK is read
    if command is None:
        if not words or words[0] not in COMMANDS:
            known = "\n".join(f"  {name:<12}{run.__doc__}" for name, run in COMMANDS.items())
            print(f"usage: deepnmt COMMAND ...\n\n{known}\n\ndeepnmt COMMAND --help says more.")
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
    """A parser of a recipe and overrides; commands add their own options."""
    parser = argparse.ArgumentParser(
        prog=f"deepnmt {command}", description=text, epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    parser.add_argument("recipe", help="a recipe file, or the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE",
                        help="settings to change, for example model.encoder.layers=18 train.updates=300")
    return parser


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Recipe]:
    """Options may stand between overrides. A run's folder is the run, wherever it was moved since it was trained."""
    found = parser.parse_intermixed_args(words)
    folder = Path(found.recipe)
    if (folder / "manifest.json").is_file():
        raise UserError(f"{folder} is no run and no recipe; give the folder of the run, and a single checkpoint of it "
                        "with --checkpoint where the command has that")
    here = [f"run={json.dumps(str(folder))}"] if folder.is_dir() else []
    return found, load_recipe(found.recipe, [*here, *found.overrides])


def _prepare(words: list[str]) -> int:
    """Filter and segment a corpus into a data folder."""
    parser = _parser(
        "prepare",
        "Trains the vocabulary, filters the training text and writes token arrays into the recipe's data.folder.\n"
        "A folder that is up to date is left as it is.",
        "python tools/prepare_data.py recipes/demo/admin_18l-18l.yaml vocab.size=2000",
    )
    _, recipe = _parse(parser, words)
    from deepnmt.prepare import prepare

    print(prepare(recipe))
    return 0


def _profile(words: list[str]) -> int:
    """Measure Admin's omega on the first batch."""
    parser = _parser(
        "profile",
        "Profiles an Admin model layer by layer and writes admin_profile.json and .png into the run folder.\n"
        "Runs alone, or on several processes under a launcher.",
        "deepspeed --num_accelerators 2 tools/profile_admin.py recipes/demo/admin_18l-18l.yaml",
    )
    _, recipe = _parse(parser, words)
    from deepnmt.parallel.launch import processes
    from deepnmt.profile import profile

    with processes(recipe.parallel.threads) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)
    return 0


def _train(words: list[str]) -> int:
    """Train a recipe, or go on with a run."""
    parser = _parser(
        "train",
        "Trains a recipe into its run folder. Started again, it goes on where it was.\n"
        "Runs alone, or on several processes under deepspeed, torchrun or srun.",
        "deepspeed --num_accelerators 2 tools/train.py recipes/demo/admin_18l-18l.yaml train.updates=300",
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="print the resolved recipe, sizes and layout; train nothing")
    found, recipe = _parse(parser, words)
    if found.dry_run:
        from deepnmt.dry_run import describe

        print(describe(recipe))
        return 0
    from deepnmt.parallel.launch import processes
    from deepnmt.train import train

    with processes(recipe.parallel.threads, group=recipe.parallel.ds_config is not None) as ranks:
        return train(recipe, ranks)


def _average(words: list[str]) -> int:
    """Average a run's checkpoints."""
    parser = _parser(
        "average",
        "Averages checkpoints of a run into RUN/averaged (or --output); by default the last average_last.",
        "python tools/average_checkpoints.py runs/demo --last 5",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--last", type=int, metavar="N", help="the last N")
    group.add_argument("--best", type=int, metavar="N", help="the N with the best validation")
    group.add_argument("--updates", metavar="U,U,...", help="these updates")
    group.add_argument("--range", metavar="FROM:TO", help="all from update FROM to update TO")
    group.add_argument("--checkpoints", nargs="+", metavar="FOLDER", help="these folders, of any runs of one model")
    parser.add_argument("--output", metavar="FOLDER", help="where the average goes (default: RUN/averaged)")
    found, recipe = _parse(parser, words)
    updates = _numbers("--updates", found.updates, ",")
    span = _numbers("--range", found.range, ":")
    if span is not None and len(span) != 2:
        raise UserError(f"--range is {found.range!r}, must be FROM:TO, for example 800:1000")
    from deepnmt.average import average_run

    print(average_run(recipe, last=found.last, best=found.best, updates=updates,
                      span=None if span is None else (span[0], span[1]), folders=found.checkpoints,
                      output=found.output))
    return 0


def _numbers(option: str, text: str | None, separator: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise UserError(f"{option} is {text!r}, must be whole numbers with {separator!r} between, for example "
                        f"800{separator}1000") from None


def _translate(words: list[str]) -> int:
    """Translate text with a trained model."""
    parser = _parser(
        "translate",
        "Translates lines of a file or of standard input, one line out for each line in. The search is set by the\n"
        "recipe's translate section; more than one translation a line is written as TSV or JSON lines.",
        "python tools/translate.py runs/demo --input in.en --output out.de translate.beam=5",
    )
    parser.add_argument("--input", default="-", metavar="FILE", help="a sentence a line, .gz too; -: standard input")
    parser.add_argument("--output", default="-", metavar="FILE", help="where translations go; -: standard output")
    parser.add_argument("--form", default="text", choices=["text", "tsv", "jsonl"],
                        help="text: the best translation; tsv: line, rank, score, text; jsonl: one object a line")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    found, recipe = _parse(parser, words)
    from deepnmt.parallel.launch import processes
    from deepnmt.translate import translate_files

    with processes(recipe.parallel.threads) as ranks:
        translate_files(Path(found.checkpoint or recipe.run), found.input, found.output, recipe.translate,
                        form=found.form, seed=recipe.seed, device=ranks.device, rank=ranks.rank, world=ranks.world,
                        gather=ranks.gather_bytes)
    return 0


def _evaluate(words: list[str]) -> int:
    """Score translations with SacreBLEU."""
    parser = _parser(
        "evaluate",
        "Translates and scores the recipe's test sets (or --test), or scores ready translations (--hypotheses), with\n"
        "SacreBLEU: BLEU, chrF and TER with signatures, a table, JSON.",
        "python tools/evaluate.py runs/demo --test test",
    )
    parser.add_argument("--test", action="append", metavar="SET",
                        help="a name of data.test, NAME=SRC,REF files, or SacreBLEU's name such as wmt14/full; "
                        "may be given several times (default: all of data.test)")
    parser.add_argument("--hypotheses", action="append", metavar="SYSTEM=FILE[,FILE...]",
                        help="score these translations of the test sets, one file a set; several systems are compared "
                        "with the first by paired bootstrap")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    parser.add_argument("--output", metavar="FILE", help="JSON file (default: RUN/scores.json)")
    found, recipe = _parse(parser, words)
    from deepnmt.evaluate import evaluate_run
    from deepnmt.parallel.launch import processes

    with processes(recipe.parallel.threads):
        print(evaluate_run(recipe, tests=found.test, hypotheses=found.hypotheses, checkpoint=found.checkpoint,
                           output=found.output))
    return 0


def _compare(words: list[str]) -> int:
    """Draw the learning curves of several runs in one picture."""
    parser = argparse.ArgumentParser(
        prog="deepnmt compare", description="Draws the training losses of several runs and prints them as a table.",
        epilog="example:\n  python tools/compare_runs.py runs/post_ln runs/admin --output runs/blocks.png",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", default="runs/comparison.png", metavar="FILE", help="the picture")
    parser.add_argument("--title", default="Training loss", help="over the picture")
    found = parser.parse_args(words)
    from deepnmt.compare import compare_runs

    print(compare_runs([Path(run) for run in found.runs], Path(found.output), found.title))
    return 0


def _benchmark(words: list[str]) -> int:
    """Time training and translation against a plain loop."""
    parser = _parser(
        "benchmark",
        "Target tokens/s of the training loop against a plain loop over torch.nn.Transformer of the same shape on the\n"
        "same batches; sentences/s of translation with and without the cache.",
        "python tools/benchmark.py recipes/multi30k/de-en_4l-4l.yaml batch.tokens=2048 --translate runs/multi30k_de-en",
    )
    parser.add_argument("--updates", type=int, default=20, metavar="N", help="timed updates a round (default 20)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--translate", metavar="RUN", help="a trained run whose first test set is translated")
    parser.add_argument("--output", default="runs/benchmark.json", metavar="FILE", help="JSON file")
    found, recipe = _parse(parser, words)
    from deepnmt.benchmark import benchmark, save

    run = Path(found.translate) if found.translate else None
    save(benchmark(recipe, found.updates, found.rounds, run), Path(found.output))
    return 0


def _demo(words: list[str]) -> int:
    """The whole path on a corpus made here."""
    parser = _parser(
        "demo",
        "Writes the demo corpus, prepares it, trains under deepspeed on two processes, averages, translates and\n"
        "scores. What is there already is reused.",
        "python tools/demo.py recipes/demo/admin_18l-18l.yaml",
    )
    parser.add_argument("--pairs", type=int, default=110_000, metavar="N",
                        help="training pairs (default 110,000); the other texts shrink with fewer than 10,000")
    found, recipe = _parse(parser, words)
    from deepnmt.walkthrough import walk

    return walk(recipe, found.pairs)


def _split(words: list[str]) -> int:
    """Split a TSV into training, validation and test texts."""
    parser = argparse.ArgumentParser(
        prog="deepnmt split",
        description="Writes train, valid and test texts that share no sentence, also where one sentence of the\n"
        "target side has several translations. Prints the number of pairs in each.",
        epilog="example:\n  python tools/split_tsv.py deu-eng.tsv.gz data/tatoeba/text --columns 2 1 --langs de en",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    parser.add_argument("tsv", type=Path, help="sentence pairs, plain or .gz")
    parser.add_argument("folder", type=Path, help="where the texts go")
    parser.add_argument("--columns", type=int, nargs=2, default=[1, 2], metavar=("SRC", "TRG"),
                        help="of source and target, counted from 1 (default 1 2)")
    parser.add_argument("--langs", nargs=2, required=True, metavar=("SRC", "TRG"), help="the files' endings")
    parser.add_argument("--valid", type=int, default=10, metavar="N", help="of 1,000 target sentences (default 10)")
    parser.add_argument("--test", type=int, default=20, metavar="N", help="of 1,000 target sentences (default 20)")
    found = parser.parse_args(words)
    from deepnmt.split_tsv import split_tsv

    print(split_tsv(found.tsv, found.folder, tuple(found.columns), tuple(found.langs), found.valid, found.test))
    return 0


def _gpu_report(words: list[str]) -> int:
    """Report what a GPU does with the recipes, in ten minutes."""
    parser = argparse.ArgumentParser(
        prog="deepnmt gpu-report",
        description="Matrix products, 60L-12L updates in fp16 and bf16 with model FLOPs utilisation, and Tatoeba\n"
        "De-En trained by the clock and scored: a JSON file and a Markdown page, in one call of under ten minutes.",
        epilog="example:\n  python tools/gpu_report.py --tsv deu-eng.tsv.gz --output runs/gpu_report",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_report"), metavar="FOLDER", help="a new folder")
    parser.add_argument("--tsv", type=Path, metavar="FILE", help="Tatoeba's pairs, English first, plain or .gz")
    parser.add_argument("--recipes", type=Path, default=Path("recipes/tatoeba"), metavar="FOLDER",
                        help="of the two recipes (default recipes/tatoeba)")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N",
                        help="of updates in the training, less if the budget ends before (default 8)")
    parser.add_argument("--budget", type=float, default=580.0, metavar="SECONDS", help="for everything (default 580)")
    parser.add_argument("--toy", action="store_true", help="tiny models and, without --tsv, the demo's corpus: a trial")
    found = parser.parse_args(words)
    from deepnmt.gpu_report import gpu_report

    return gpu_report(found.output, found.recipes, found.tsv, found.minutes, found.budget, found.toy)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "prepare": _prepare,
    "profile": _profile,
    "train": _train,
    "average": _average,
    "translate": _translate,
    "evaluate": _evaluate,
    "compare": _compare,
    "benchmark": _benchmark,
    "split": _split,
    "gpu-report": _gpu_report,
    "demo": _demo,
}


def entry() -> None:
    """The console script."""
    sys.exit(main())
