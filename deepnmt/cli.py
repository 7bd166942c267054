"""Every command line of deepnmt, one function a command. torch is imported only once the arguments hold."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepnmt import cli_study
from deepnmt.cli_args import expected_model, numbers, parse, plain_parser, profiled, recipe_parser, settable
from deepnmt.errors import UserError

INTERRUPTED = 130  # what a shell says of a program that SIGINT ended


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Runs `command`, or the one the first argument names; returns the exit code: 0, 2 for a user's mistake, 130 for
    Ctrl-C (which a training run takes as the word to save and stop), or the command's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [w for w in words if not w.startswith(("--local_rank", "--local-rank"))]  # launchers add it; RANK is read
    if command is None:
        if not words or words[0] in ("-h", "--help"):
            known = "\n".join(f"  {name:<15}{run.__doc__}" for name, run in COMMANDS.items())
            print(f"usage: deepnmt COMMAND ...\n\n{known}\n\ndeepnmt COMMAND --help says more.")
            return 0 if words else 2
        command, words = words[0], words[1:]
    try:
        return _command(command)(words)
    except UserError as error:
        if not (_is_later_process() if error.spoken is None else error.spoken):
            print(f"deepnmt: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        if not _is_later_process():
            print("deepnmt: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _command(name: str) -> Callable[[list[str]], int]:
    """Raises `UserError` where there is none of that name."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise UserError(f"there is no command {name!r}{hint} deepnmt --help lists what there is")
    return COMMANDS[name]


def _is_later_process() -> bool:
    """Whether a launcher says that this is not the first process on its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"


def _prepare(words: list[str]) -> int:
    """Filter and segment a corpus into a data folder."""
    parser = recipe_parser(
        "prepare",
        "Trains the vocabulary, filters the training text and writes token arrays into the recipe's data.folder.\n"
        "A folder that is up to date is left as it is.",
        "python tools/prepare_data.py recipes/demo/admin_18l-18l.yaml vocab.size=2000 data.folder=data/small",
    )
    _, recipe = parse(parser, words)
    from deepnmt.prepare import prepare

    print(prepare(recipe))
    return 0


def _profile(words: list[str]) -> int:
    """Measure Admin's omega on the first batch."""
    parser = recipe_parser(
        "profile",
        "Profiles an Admin model layer by layer and writes admin_profile.json and .png into the run folder.\n"
        "Runs alone, or on several processes under a launcher.",
        "deepspeed --quiet --num_accelerators 2 tools/profile_admin.py recipes/demo/admin_18l-18l.yaml",
    )
    _, recipe = parse(parser, words)
    from deepnmt.parallel.launch import processes
    from deepnmt.profile import profile

    with processes(recipe.parallel.threads) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)
    return 0


def _train(words: list[str]) -> int:
    """Train a recipe, or go on with a run."""
    parser = recipe_parser(
        "train",
        "Trains a recipe into its run folder. Started again, it goes on where it was.\n"
        "Runs alone, or on several processes under deepspeed, torchrun or srun.",
        "deepspeed --quiet --num_accelerators 2 tools/train.py recipes/demo/admin_18l-18l.yaml train.updates=300",
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="print the resolved recipe, sizes and layout; train nothing")
    found, recipe = parse(parser, words)
    profiled(found, recipe)
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
    parser = recipe_parser(
        "average",
        "Averages checkpoints of a run into RUN/averaged (or --output); by default the last average_last.",
        "python tools/average_checkpoints.py runs/demo --last 3",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--last", type=int, metavar="N", help="the last N")
    group.add_argument("--best", type=int, metavar="N", help="the N with the best validation")
    group.add_argument("--updates", metavar="U,U,...", help="these updates")
    group.add_argument("--range", metavar="FROM:TO", help="all from update FROM to update TO")
    group.add_argument("--checkpoints", nargs="+", metavar="FOLDER", help="these folders, of any runs of one model")
    parser.add_argument("--output", metavar="FOLDER", help="where the average goes (default: RUN/averaged)")
    found, recipe = parse(parser, words)
    chosen = any(way is not None for way in (found.last, found.best, found.updates, found.range, found.checkpoints))
    settable(found, ["run", "model", *([] if chosen else ["average_last"])], "checkpoints are averaged as they are")
    updates = numbers("--updates", found.updates, ",")
    span = numbers("--range", found.range, ":")
    if span is not None and len(span) != 2:
        raise UserError(f"--range is {found.range!r}, must be FROM:TO, for example 800:1000")
    from deepnmt.average import average_run

    print(average_run(recipe, last=found.last, best=found.best, updates=updates,
                      span=None if span is None else (span[0], span[1]), folders=found.checkpoints,
                      output=found.output, model=expected_model(found, recipe, found.checkpoints)))
    return 0


def _fold(words: list[str]) -> int:
    """Fold an Admin or DeepNorm model into plain Post-LN."""
    parser = recipe_parser(
        "fold",
        "Writes the model of a run as a plain Post-LN checkpoint with the same logits: Admin's and DeepNorm's factors\n"
        "go into the norms and matrices beside them. Other stacks stay as they are.",
        "python tools/fold_model.py runs/demo --output runs/demo/folded",
    )
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    parser.add_argument("--output", metavar="FOLDER", help="where the folded model goes (default: RUN/folded)")
    found, recipe = parse(parser, words)
    settable(found, ["run"], "a trained model is folded as it is")
    from deepnmt.fold import fold_run

    print(fold_run(recipe, checkpoint=found.checkpoint, output=found.output))
    return 0


def _translate(words: list[str]) -> int:
    """Translate text with a trained model."""
    parser = recipe_parser(
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
    found, recipe = parse(parser, words)
    settable(found, ["run", "model", "translate", "seed", "parallel.threads"], "a trained model translates as it is")
    from deepnmt.parallel.launch import processes
    from deepnmt.translate import translate_files

    with processes(recipe.parallel.threads) as ranks:
        translate_files(Path(found.checkpoint or recipe.run), found.input, found.output, recipe.translate,
                        form=found.form, seed=recipe.seed, device=ranks.device, rank=ranks.rank, world=ranks.world,
                        gather=ranks.gather_bytes, expected=expected_model(found, recipe, found.checkpoint))
    return 0


def _evaluate(words: list[str]) -> int:
    """Score translations with SacreBLEU."""
    parser = recipe_parser(
        "evaluate",
        "Translates and scores the recipe's test sets (or --test), or scores ready translations (--hypotheses), with\n"
        "SacreBLEU: BLEU, chrF and TER with signatures, a table, JSON. Runs alone, or on several processes.",
        "python tools/evaluate.py runs/demo --test test",
    )
    parser.add_argument("--test", action="append", metavar="SET",
                        help="a name of data.test, NAME=SRC,REF files, or SacreBLEU's name such as wmt14/full; "
                        "may be given several times (default: all of data.test)")
    parser.add_argument("--hypotheses", action="append", metavar="SYSTEM=FILE[,FILE...]",
                        help="score these translations of the test sets, one file a set; several systems are compared "
                        "with the first by paired bootstrap")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    parser.add_argument("--output", metavar="FILE",
                        help="JSON file (default: RUN/scores.json, or RUN/scores-NAMES.json where --test, "
                        "--hypotheses, --checkpoint or settings make it other scores than the run's own)")
    found, recipe = parse(parser, words)
    scored = ["run", "data.test", "data.src_lang", "data.trg_lang", "parallel.threads"]
    if found.hypotheses:
        settable(found, scored, "ready translations are scored")
    else:
        settable(found, [*scored, "model", "translate", "seed"], "a trained model translates as it is")
    from deepnmt.evaluate import evaluate_run
    from deepnmt.parallel.launch import processes

    with processes(recipe.parallel.threads) as ranks:
        table = evaluate_run(recipe, tests=found.test, hypotheses=found.hypotheses, checkpoint=found.checkpoint,
                             output=found.output, expected=expected_model(found, recipe, found.checkpoint),
                             device=ranks.device, rank=ranks.rank, world=ranks.world, gather=ranks.gather_bytes)
        if ranks.first:
            print(table)
    return 0


def _demo(words: list[str]) -> int:
    """The whole path on a corpus made here."""
    parser = recipe_parser(
        "demo",
        "Writes the demo corpus, prepares it, trains under deepspeed on two processes, averages, translates and\n"
        "scores. What is there already is reused.",
        "python tools/demo.py recipes/demo/admin_18l-18l.yaml",
    )
    parser.add_argument("--pairs", type=int, default=110_000, metavar="N",
                        help="training pairs (default 110,000); the other texts shrink with fewer than 10,000")
    found, recipe = parse(parser, words)
    from deepnmt.walkthrough import walk

    return walk(recipe, found.pairs)


def _split(words: list[str]) -> int:
    """Split a TSV into training, validation and test texts."""
    parser = plain_parser(
        "split",
        "Writes train, valid and test texts that share no sentence, also where one sentence of the\n"
        "target side has several translations. Prints the number of pairs in each.",
        "python tools/split_tsv.py deu-eng.tsv.gz data/tatoeba/text --columns 2 1 --langs de en",
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


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "prepare": _prepare,
    "profile": _profile,
    "train": _train,
    "average": _average,
    "fold": _fold,
    "translate": _translate,
    "evaluate": _evaluate,
    "compare": cli_study.compare,
    "diagnose": cli_study.diagnose,
    "verdict-grid": cli_study.verdict_grid,
    "reproduce": cli_study.reproduce,
    "compare-blocks": cli_study.compare_blocks,
    "benchmark": cli_study.benchmark,
    "layouts": cli_study.layouts,
    "pipeline-idle": cli_study.pipeline_idle,
    "split": _split,
    "gpu-report": cli_study.gpu_report,
    "demo": _demo,
}


def entry() -> None:
    """The console script."""
    sys.exit(main())
