"""Commands around the training job: `profile`, `train`, `status`, `average`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import expected_model, numbers, parse, profiled, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.commands.options import processes_of
from deepnmt.errors import UserError


def profile(words: list[str]) -> None:
    """Measure Admin's omega before training (training does it too)."""
    parser = recipe_parser(
        "profile",
        "Measures omega, Admin's weight of each residual connection, on the first batch of the training text.\n"
        "Training does the same when a run begins, so this is for a look beforehand.\n\n"
        "Reads the prepared data. Writes admin_profile.json and admin_profile.png into the run folder.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt profile my.yaml\n"
        "deepspeed --quiet --num_accelerators 2 --module deepnmt profile my.yaml",
    )
    _, recipe = parse(parser, words)
    from deepnmt.training.profile import profile

    with processes_of(recipe) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)


def train(words: list[str]) -> int:
    """Train the model of a recipe, or resume its training."""
    parser = recipe_parser(
        "train",
        "Trains the model that a recipe describes. If the run folder already holds a checkpoint, training resumes\n"
        "from it.\n\n"
        "Reads the prepared data. Writes checkpoints, log.jsonl, TensorBoard files and STATUS.json into the run\n"
        "folder. Runs as one process, or as several under deepspeed, torchrun or srun.\n\n"
        "exit codes:\n"
        "    0  the run is finished\n"
        "    2  a mistake in the recipe, the data or the command line, or a run that diverged; a message says which\n"
        "   75  stopped by a signal (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) or with its launcher, and saved; the same\n"
        "       command resumes\n"
        "   76  another process of the run has ended, was stopped or is cut off; the same command resumes from the\n"
        "       newest checkpoint\n"
        "  130  stopped by Ctrl-C before the first update",
        "deepnmt train my.yaml\n"
        "deepnmt train my.yaml model.encoder.block=b2t train.updates=300 --dry-run\n"
        "deepnmt train my.yaml --dry-run --card h100-80\n"
        "deepspeed --quiet --num_accelerators 2 --module deepnmt train my.yaml\n"
        "torchrun --nproc_per_node 2 -m deepnmt train my.yaml",
        setting="model.encoder.block=b2t",
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="print the whole recipe, the model's size, memory and layout, and train nothing")
    parser.add_argument("--card", metavar="NAME", help="with --dry-run: the largest micro-batch for a GPU, by name and "
                        "memory, such as h100-80")
    args, recipe = parse(parser, words)
    profiled(args, recipe)
    if args.card is not None and not args.dry_run:
        raise UserError("--card has no effect without --dry-run; add it, or remove --card")
    if args.dry_run:
        from deepnmt.device import CARDS
        from deepnmt.parallel.ds_config import check_with_deepspeed
        from deepnmt.processes.host import quiet_libraries
        from deepnmt.training.dry_run import planned_layout
        from deepnmt.training.task import plan

        if args.card not in (None, *CARDS):
            raise UserError(f"--card is {args.card}, must be one of {', '.join(CARDS)}")
        quiet_libraries()
        check_with_deepspeed(planned_layout(recipe))
        print(plan(recipe, args.card))
        return 0
    from deepnmt.training.trainer import train

    with processes_of(recipe, group=recipe.parallel.ds_config is not None) as ranks:
        return train(recipe, ranks)


def status(words: list[str]) -> int:
    """Say how a run stands, by a sentence and an exit code."""
    parser = recipe_parser(
        "status",
        "Says how a run stands: running, finished, stopped, failed, or ended without a word. For scripts, since\n"
        "launchers do not always hand on how training ended.\n\n"
        "Reads STATUS.json and the lock of the run folder. Prints a line.\n\n"
        "exit codes:\n"
        "    0  finished\n"
        "    1  ended without saying so, or with a lost process; the same command resumes it\n"
        "    2  failed, or no training has begun there; the line says which\n"
        "    3  running\n"
        "   75  stopped by a signal or with its launcher, and saved; the same command resumes it",
        "deepnmt status runs/my\n"
        "deepnmt status my.yaml run=runs/other",
    )
    args = parser.parse_intermixed_args(words)
    folder = Path(args.recipe)
    if args.overrides or not folder.is_dir():  # a run that was killed early has no recipe yet
        folder = Path(parse(parser, words)[1].run)
    from deepnmt.training.status import run_status

    result = run_status(folder)
    print(result.sentence)
    return result.code


def average(words: list[str]) -> None:
    """Average the weights of a run's checkpoints."""
    parser = recipe_parser(
        "average",
        "Averages the weights of several checkpoints into one model, which translate and evaluate then use.\n"
        "Without an option it takes the last average_last checkpoints, a setting of the recipe.\n\n"
        "Reads RUN/checkpoints. Writes RUN/averaged, a checkpoint folder, or the one that --output names.",
        "deepnmt average runs/my\n"
        "deepnmt average runs/my --best 3",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--last", type=int, metavar="N", help="the last N checkpoints")
    group.add_argument("--best", type=int, metavar="N", help="the N checkpoints with the best validation")
    group.add_argument("--updates", metavar="U,U,...", help="the checkpoints of these updates")
    group.add_argument("--range", metavar="FROM:TO", help="all checkpoints from update FROM to update TO")
    group.add_argument("--checkpoints", nargs="+", metavar="FOLDER",
                       help="these checkpoint folders, from any runs of the same model")
    parser.add_argument("--output", metavar="FOLDER", help="the folder of the average (default: RUN/averaged)")
    args, recipe = parse(parser, words)
    chosen = any(way is not None for way in (args.last, args.best, args.updates, args.range, args.checkpoints))
    settings = recipe.marked("average")
    if chosen:
        settings.remove("average_last")
    settable(args, settings, "checkpoints are averaged as they are")
    updates = numbers("--updates", args.updates, ",")
    span = numbers("--range", args.range, ":")
    if span is not None and len(span) != 2:
        raise UserError(f"--range is {args.range!r}, must be FROM:TO, for example 800:1000")
    from deepnmt.checkpoint.average import average_run

    print(average_run(recipe, last=args.last, best=args.best, updates=updates,
                      span=None if span is None else (span[0], span[1]), folders=args.checkpoints,
                      output=args.output, model=expected_model(args, recipe, args.checkpoints)))


GROUP = TEXT
COMMANDS: dict[str, Command] = {"profile": profile, "train": train, "status": status, "average": average}
