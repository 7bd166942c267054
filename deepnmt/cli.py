"""Every command line of deepnmt, one function a command. torch is imported only once the arguments hold."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deepnmt.arguments import (
    expected_model,
    numbers,
    parse,
    plain_parser,
    positive,
    profiled,
    recipe_parser,
    settable,
)
from deepnmt.errors import UserError

Command = Callable[[list[str]], int | None]  # the words behind it to the exit code (None: 0)

INTERRUPTED = 130  # what a shell says of a program that SIGINT ended


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """`deepnmt COMMAND ...`; see `run_command`."""
    return run_command("deepnmt", COMMANDS, command, arguments)


def run_command(
    program: str, commands: Mapping[str, Command], command: str | None = None, arguments: Sequence[str] | None = None
) -> int:
    """Runs `command`, or the one the first argument names; returns the exit code: 0, 2 for a user's mistake, 130 for
    Ctrl-C (which a training run takes as the word to save and stop), or the command's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [w for w in words if not w.startswith(("--local_rank", "--local-rank"))]  # launchers add it; RANK is read
    if command is None:
        if not words or words[0] in ("-h", "--help"):
            known = "\n".join(f"  {name:<15}{run.__doc__}" for name, run in commands.items())
            print(f"usage: {program} COMMAND ...\n\n{known}\n\n{program} COMMAND --help says more.")
            return 0 if words else 2
        command, words = words[0], words[1:]
    try:
        if command not in commands:
            near = difflib.get_close_matches(command, commands, n=1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            raise UserError(f"there is no command {command!r}{hint} {program} --help lists what there is")
        return commands[command](words) or 0
    except UserError as error:
        if not (_is_later_process() if error.reported is None else error.reported):
            print(f"deepnmt: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        if not _is_later_process():
            print("deepnmt: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _is_later_process() -> bool:
    """Whether a launcher says that this is not the first process on its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"


def _prepare(words: list[str]) -> None:
    """Filter and segment a corpus into a data folder."""
    parser = recipe_parser(
        "prepare",
        "Trains the vocabulary, filters the training text and writes token arrays into the recipe's data.folder.\n"
        "A folder that is up to date is left as it is.",
        "python tools/prepare_data.py recipes/demo/admin_18l-18l.yaml vocab.size=2000 data.folder=data/small",
    )
    _, recipe = parse(parser, words)
    from deepnmt.data.prepare import prepare

    print(prepare(recipe))


def _profile(words: list[str]) -> None:
    """Measure Admin's omega on the first batch."""
    parser = recipe_parser(
        "profile",
        "Profiles an Admin model layer by layer and writes admin_profile.json and .png into the run folder.\n"
        "Runs alone, or on several processes under a launcher.",
        "deepspeed --quiet --num_accelerators 2 tools/profile_admin.py recipes/demo/admin_18l-18l.yaml",
    )
    _, recipe = parse(parser, words)
    from deepnmt.parallel.launch import processes
    from deepnmt.train.profile import profile

    with processes(recipe.parallel.threads) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)


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
    args, recipe = parse(parser, words)
    profiled(args, recipe)
    if args.dry_run:
        from deepnmt.train.plan import describe

        print(describe(recipe))
        return 0
    from deepnmt.doctor.nonfinite import explain
    from deepnmt.doctor.training_probe import watch
    from deepnmt.parallel.launch import processes
    from deepnmt.train.trainer import train

    with processes(recipe.parallel.threads, group=recipe.parallel.ds_config is not None) as ranks:
        return train(recipe, ranks, watch=watch, explain=explain)


def _average(words: list[str]) -> None:
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
    args, recipe = parse(parser, words)
    chosen = any(way is not None for way in (args.last, args.best, args.updates, args.range, args.checkpoints))
    settable(args, ["run", "model", *([] if chosen else ["average_last"])], "checkpoints are averaged as they are")
    updates = numbers("--updates", args.updates, ",")
    span = numbers("--range", args.range, ":")
    if span is not None and len(span) != 2:
        raise UserError(f"--range is {args.range!r}, must be FROM:TO, for example 800:1000")
    from deepnmt.checkpoint.average import average_run

    print(average_run(recipe, last=args.last, best=args.best, updates=updates,
                      span=None if span is None else (span[0], span[1]), folders=args.checkpoints,
                      output=args.output, model=expected_model(args, recipe, args.checkpoints)))


def _fold(words: list[str]) -> None:
    """Fold an Admin or DeepNorm model into plain Post-LN."""
    parser = recipe_parser(
        "fold",
        "Writes the model of a run as a plain Post-LN checkpoint with the same logits: Admin's and DeepNorm's factors\n"
        "go into the norms and matrices beside them. Other stacks stay as they are.",
        "python tools/fold_model.py runs/demo --output runs/demo/folded",
    )
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    parser.add_argument("--output", metavar="FOLDER", help="where the folded model goes (default: RUN/folded)")
    args, recipe = parse(parser, words)
    settable(args, ["run"], "a trained model is folded as it is")
    from deepnmt.export import EXPORTERS

    print(EXPORTERS["post_ln"](recipe, args.checkpoint, args.output))


def _translate(words: list[str]) -> None:
    """Translate text with a trained model."""
    parser = recipe_parser(
        "translate",
        "Translates lines of a file or of standard input, one line out for each line in. The search is set by the\n"
        "recipe's translate section; more than one translation a line is written as TSV or JSON lines.",
        "python tools/translate.py runs/demo --input in.en --output out.de translate.beam=5",
    )
    add = parser.add_argument
    add("--input", default="-", metavar="FILE", help="a sentence a line, .gz too; -: standard input")
    add("--output", default="-", metavar="FILE", help="where translations go; -: standard output")
    add("--form", default="text", choices=["text", "tsv", "jsonl"],
                        help="text: the best translation; tsv: line, rank, score, text; jsonl: one object a line")
    add("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    args, recipe = parse(parser, words)
    settable(args, ["run", "model", "translate", "seed", "parallel.threads"], "a trained model translates as it is")
    from deepnmt.decode.translate import translate_files
    from deepnmt.parallel.launch import processes

    with processes(recipe.parallel.threads) as ranks:
        translate_files(Path(args.checkpoint or recipe.run), args.input, args.output, recipe.translate,
                        form=args.form, seed=recipe.seed, ranks=ranks,
                        expected=expected_model(args, recipe, args.checkpoint))


def _evaluate(words: list[str]) -> None:
    """Score translations with SacreBLEU."""
    parser = recipe_parser(
        "evaluate",
        "Translates and scores the recipe's test sets (or --test), or scores ready translations (--hypotheses), with\n"
        "SacreBLEU: BLEU, chrF and TER with signatures, a table, JSON. Runs alone, or on several processes.",
        "python tools/evaluate.py runs/demo --test test",
    )
    add = parser.add_argument
    add("--test", action="append", metavar="SET",
                        help="a name of data.test, NAME=SRC,REF files, or SacreBLEU's name such as wmt14/full; "
                        "may be given several times (default: all of data.test)")
    add("--hypotheses", action="append", metavar="SYSTEM=FILE[,FILE...]",
                        help="score these translations of the test sets, one file a set; several systems are compared "
                        "with the first by paired bootstrap")
    add("--checkpoint", metavar="FOLDER", help="default: the run's average, else its newest")
    add("--output", metavar="FILE",
                        help="JSON file (default: RUN/scores.json, or RUN/scores-NAMES.json where --test, "
                        "--hypotheses, --checkpoint or settings make it other scores than the run's own)")
    args, recipe = parse(parser, words)
    scored = ["run", "data.test", "data.src_lang", "data.trg_lang", "parallel.threads"]
    if args.hypotheses:
        settable(args, scored, "ready translations are scored")
    else:
        settable(args, [*scored, "model", "translate", "seed"], "a trained model translates as it is")
    from deepnmt.evaluate.evaluate import evaluate_run
    from deepnmt.parallel.launch import processes

    with processes(recipe.parallel.threads) as ranks:
        table = evaluate_run(recipe, tests=args.test, hypotheses=args.hypotheses, checkpoint=args.checkpoint,
                             output=args.output, expected=expected_model(args, recipe, args.checkpoint),
                             ranks=ranks)
        if ranks.first:
            print(table)


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
    args, recipe = parse(parser, words)
    from deepnmt.demo.run import walk

    return walk(recipe, args.pairs)


def _split(words: list[str]) -> None:
    """Split a TSV into training, validation and test texts."""
    parser = plain_parser(
        "split",
        "Writes train, valid and test texts that share no sentence, also where one sentence of the\n"
        "target side has several translations. Prints the number of pairs in each.",
        "python tools/split_tsv.py deu-eng.tsv.gz data/tatoeba/text --columns 2 1 --langs de en",
    )
    add = parser.add_argument
    add("tsv", type=Path, help="sentence pairs, plain or .gz")
    add("folder", type=Path, help="where the texts go")
    add("--columns", type=int, nargs=2, default=[1, 2], metavar=("SRC", "TRG"),
                        help="of source and target, counted from 1 (default 1 2)")
    add("--langs", nargs=2, required=True, metavar=("SRC", "TRG"), help="the files' endings")
    add("--valid", type=int, default=10, metavar="N", help="of 1,000 target sentences (default 10)")
    add("--test", type=int, default=20, metavar="N", help="of 1,000 target sentences (default 20)")
    args = parser.parse_args(words)
    from deepnmt.data.split import split_tsv

    print(split_tsv(args.tsv, args.folder, tuple(args.columns), tuple(args.langs), args.valid, args.test))


def _diagnose(words: list[str]) -> None:
    """Look into a model before training, and at its checkpoints."""
    parser = recipe_parser(
        "diagnose",
        "Measures on one batch how layers depend on each other, how far an update moves the output, gradients,\n"
        "ranges and likeness of layers, and says whether the recipe will train. Prints a table; writes JSON, pictures\n"
        "and one page into RUN/diagnosis. Of a run that has checkpoints the newest is taken, into\n"
        "RUN/diagnosis-CHECKPOINT.",
        "python tools/diagnose.py recipes/demo/admin_18l-18l.yaml model.encoder.block=post_ln",
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", metavar="FOLDER", help="a checkpoint, or a run whose newest is meant")
    which.add_argument("--fresh", action="store_true", help="of a run: the weights it began with")
    add("--output", type=Path, metavar="FOLDER",
                        help="default: RUN/diagnosis or RUN/diagnosis-CHECKPOINT")
    add("--tokens", type=int, default=1024, metavar="N", help="target tokens looked at (default 1024)")
    add("--processes", type=int, default=1, metavar="N",
                        help="that training will run on, for the size of an update (default 1)")
    add("--rule", type=Path, metavar="FILE", help="a verdict rule other than deepnmt's own")
    args, recipe = parse(parser, words)
    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}, must be 1 or more, for example 1024")
    positive(args, "processes")
    if args.fresh and not Path(args.recipe).is_dir():
        raise UserError(f"--fresh is of a run's folder, but {args.recipe} is a recipe, whose model is always new; "
                        "leave it out")
    profiled(args, recipe, ["tokens"])  # Admin as an alternative, and at other depths, is profiled in any recipe
    from deepnmt.doctor.diagnose import AT_CHECKPOINT, default_checkpoint, diagnose
    from deepnmt.parallel.launch import processes, rank_from_environment

    if (count := rank_from_environment()[1]) > 1:
        raise UserError(f"diagnose was started on {count} processes, but it looks at one model by itself; start it "
                        "alone, and say with --processes how many training will run on")
    with processes(recipe.parallel.threads) as ranks:
        is_run = Path(args.recipe).is_dir() and not args.fresh
        checkpoint = default_checkpoint(recipe, args.checkpoint, is_run)
        if checkpoint is not None:
            settable(args, AT_CHECKPOINT, f"{checkpoint} is as it was trained; --fresh looks at a new model")
            if args.rule is not None:
                raise UserError(f"--rule {args.rule} has no say here, since a rule knows models before training and "
                                f"{checkpoint} is a checkpoint; leave it out, or look at a new model with --fresh")
            if args.processes != parser.get_default("processes"):
                raise UserError(f"--processes {args.processes} has no say here, since only a verdict asks for it, and "
                                f"{checkpoint} is a checkpoint; leave it out, or look at a new model with --fresh")
        print(diagnose(recipe, ranks.device, checkpoint=checkpoint, output=args.output, tokens=args.tokens,
                       rule=args.rule, processes=args.processes))


def _gpu_report(words: list[str]) -> int:
    """Report what a GPU does with the recipes, in ten minutes."""
    parser = plain_parser(
        "gpu-report",
        "Matrix products, 60L-12L updates in fp16 and bf16 with model FLOPs utilisation, and Tatoeba De-En trained by\n"
        "the clock and scored, for eight minutes or what is left of the budget: a JSON file and a Markdown page, in\n"
        "one call of under ten minutes. --part layouts, a call of its own, has in place of the training 300 updates\n"
        "of 60L-12L on Tatoeba in fp16, under ZeRO-1 and as a pipeline of one stage.",
        "python tools/gpu_report.py --tsv deu-eng.tsv.gz --output runs/gpu_report",
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/gpu_report"), metavar="FOLDER", help="a new folder")
    add("--tsv", type=Path, metavar="FILE", help="Tatoeba's pairs, English first, plain or .gz")
    add("--recipes", type=Path, default=Path("recipes/tatoeba"), metavar="FOLDER",
                        help="of the two recipes (default recipes/tatoeba)")
    add("--minutes", type=float, default=8.0, metavar="N",
                        help="of updates in the training, less if the budget ends before (default 8)")
    add("--budget", type=float, default=590.0, metavar="SECONDS", help="for everything (default 590)")
    add("--part", choices=("training", "layouts"), default="training",
                        help="what is done with the text (default training)")
    add("--toy", action="store_true", help="tiny models and, without --tsv, the demo's corpus: a trial")
    args = parser.parse_args(words)
    from deepnmt.demo.corpus import make_corpus
    from deepnmt.gpu_report.report import gpu_report

    def toy(folder: Path) -> dict[str, int]:
        return dict(make_corpus(folder, pairs=600, valid=20, test=20)["counts"])

    return gpu_report(args.output, args.recipes, args.tsv, args.minutes, args.budget, toy if args.toy else None,
                      args.part)


COMMANDS: dict[str, Command] = {command.__name__[1:].replace("_", "-"): command for command in (
    _prepare, _profile, _train, _average, _fold, _translate, _evaluate, _diagnose, _split, _gpu_report, _demo)}


def entry() -> None:
    """The console script."""
    sys.exit(main())
