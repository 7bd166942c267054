"""The command `diagnose`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from deepnmt.arguments import parse, positive, profiled, recipe_parser, settable
from deepnmt.commands import EXAMINE, Command
from deepnmt.commands.options import checkpoint_of, processes_of
from deepnmt.config import Recipe
from deepnmt.errors import UserError, enough_memory


def diagnose(words: list[str]) -> None:
    """Predict whether a deep model will train, and examine its layers."""
    parser = recipe_parser(
        "diagnose",
        "Examines a model on one batch: how layers depend on each other, how far an update moves the output,\n"
        "gradients, ranges, and how similar layers are. For a recipe it trains for 40 updates and predicts what the\n"
        "model will do after more: stuck or diverging, the target side only, or translating. For a run that has\n"
        "checkpoints, or an average alone, it examines the newest, and measures which of the three it does.\n\n"
        "Reads the prepared data. Prints a table and writes JSON, pictures and a page into RUN/diagnosis, or\n"
        "RUN/diagnosis-CHECKPOINT.",
        "deepnmt diagnose my.yaml\n"
        "deepnmt diagnose my.yaml model.encoder.block=post_ln\n"
        "deepnmt diagnose runs/my --checkpoint best\n"
        "deepnmt diagnose my.yaml model.encoder.block=pre_ln model.decoder.block=pre_ln --coordinates "
        "--widths 32 64 128 256 --depths 2 4 8 16 32 64",
        setting="model.encoder.block=post_ln",
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", metavar="WHICH",
                       help="best (by validation), newest, averaged, the folder of a checkpoint, or a run, whose "
                       "newest is taken")
    which.add_argument("--fresh", action="store_true", help="examine the initial weights of a run")
    add("--output", type=Path, metavar="FOLDER",
        help="the folder of the results (default: RUN/diagnosis or RUN/diagnosis-CHECKPOINT)")
    add("--tokens", type=int, default=256, metavar="N", help="target tokens of the batch (default 256)")
    add("--updates", type=int, metavar="N",
        help="predict what the model does after N updates (default: train.updates)")
    add("--minutes", type=float, default=10.0, metavar="N",
        help="where it is not predicted to translate, try no other recipe that would end after N minutes; 0: none "
        "(default 10)")
    add("--processes", type=int, default=1, metavar="N",
        help="processes that training will run on, which the size of an update depends on (default 1)")
    add("--rule", type=Path, metavar="FILE", help="a verdict rule to use in place of deepnmt's own")
    add("--coordinates", action="store_true",
        help="instead of all that: do activations and their changes keep their size over widths and depths, with\n"
        "model.tuned_at and without? Writes RUN/coordinates")
    add("--widths", type=int, nargs="+", metavar="N", help="for it (default 32 64 128)")
    add("--depths", type=int, nargs="+", metavar="N", help="for it, layers of each stack (default 4 8 16 32)")
    add("--seeds", type=int, metavar="N", help="for it, models of each size (default 3)")
    args, recipe = parse(parser, words)
    if recipe.task != type(recipe).default("task"):
        raise UserError(f"the recipe has task: {recipe.task}, but the doctor's verdict was learned from translation, "
                        "and what it measures has a source; look at the losses of a short run instead, for example "
                        "with train.updates=300 train.probe_every=50")
    if args.coordinates:
        return _coordinates(parser, args, recipe)
    for name in ("widths", "depths", "seeds"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} has no effect without --coordinates; add it, or remove --{name}")
    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}, must be 1 or more, for example 256")
    positive(args, "processes")
    if not args.minutes >= 0:
        raise UserError(f"--minutes is {args.minutes:g}, must be 0 or more; with 0 no other recipe is tried")
    if args.updates is not None and not 1 <= args.updates <= recipe.train.updates:
        raise UserError(f"--updates is {args.updates}, must be from 1 to train.updates ({recipe.train.updates})")
    if args.fresh and not Path(args.recipe).is_dir():
        raise UserError(f"--fresh has no effect here because {args.recipe} is a recipe, whose model is always new; "
                        "remove it, or give the folder of a run")
    profiled(args, recipe, ["tokens"])  # Admin as an alternative, and at other depths, is profiled in any recipe
    from deepnmt.extras.doctor.diagnose import OF_CHECKPOINT, default_checkpoint, diagnose
    from deepnmt.processes.process_group import rank_from_environment

    count = rank_from_environment()[1]
    if count > 1:
        raise UserError(f"diagnose was started on {count} processes, but it looks at one model by itself; start it "
                        "alone, and say with --processes how many training will run on")
    with processes_of(recipe) as ranks, enough_memory("give fewer --tokens or a smaller model, or set "
                                                      "parallel.device=cpu"):
        is_run = Path(args.recipe).is_dir() and not args.fresh
        checkpoint = default_checkpoint(recipe, checkpoint_of(args.checkpoint, recipe), is_run)
        if checkpoint is not None:
            settable(args, OF_CHECKPOINT, f"{checkpoint} is as it was trained; --fresh looks at a new model")
            if args.rule is not None:
                raise UserError(f"--rule {args.rule} has no effect here because a rule judges models before training "
                                f"and {checkpoint} is a checkpoint; remove it, or look at a new model with --fresh")
            for name in ("processes", "updates", "minutes"):
                value = getattr(args, name)
                if value != parser.get_default(name):
                    raise UserError(f"--{name} {value} has no effect here because only a verdict asks for it, and "
                                    f"{checkpoint} is a checkpoint; remove it, or look at a new model with --fresh")
        print(diagnose(recipe, ranks.device, checkpoint=checkpoint, output=args.output, tokens=args.tokens,
                       rule=args.rule, processes=args.processes, updates=args.updates, seconds=60 * args.minutes))


def _coordinates(parser: ArgumentParser, args: Namespace, recipe: Recipe) -> None:
    for name in ("checkpoint", "fresh", "tokens", "minutes", "processes", "rule"):
        if getattr(args, name) != parser.get_default(name):
            raise UserError(f"--{name} has no effect with --coordinates; remove one of them")
    widths = args.widths or [32, 64, 128]
    depths = args.depths or [4, 8, 16, 32]
    updates = 10 if args.updates is None else args.updates
    seeds = 3 if args.seeds is None else args.seeds
    for name, values in (("widths", widths), ("depths", depths), ("updates", [updates]), ("seeds", [seeds])):
        if min(values) < 1:
            raise UserError(f"--{name} has {min(values)}, must be 1 or more")
    if len(set(widths)) == len(set(depths)) == 1:
        raise UserError("--widths and --depths name one model, compared with none; give several of one of them")
    if recipe.train.init_from is not None:
        raise UserError(f"train.init_from is {recipe.train.init_from}, but --coordinates trains models from new "
                        "weights; add train.init_from=null train.grow=null")
    for width in widths:
        if width % 8 or width % min(widths):
            raise UserError(f"--widths has {width}; all must be multiples of 8 and of the smallest")
    from deepnmt.extras.doctor.coordinates import check_coordinates

    with processes_of(recipe) as ranks, enough_memory("give smaller --widths or --depths"):
        print(check_coordinates(recipe, ranks.device, widths, depths, updates, seeds, args.output))


GROUP = EXAMINE
BEFORE = "consolidate"  # where these are listed
COMMANDS: dict[str, Command] = {"diagnose": diagnose}
