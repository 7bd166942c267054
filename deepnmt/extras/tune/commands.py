"""The command `tune`."""

from __future__ import annotations

import math
from pathlib import Path

from deepnmt.arguments import parse, positive, recipe_parser
from deepnmt.commands import EXAMINE, Command
from deepnmt.errors import UserError

RUNS = 32  # trials, where neither option says how many
LEAST = 8  # with which there are trials of the search and of the deep model
MOST = 200  # with --minutes alone


def tune(words: list[str]) -> None:
    """Find learning rates on a small copy of a recipe, and carry them to it."""
    parser = recipe_parser(
        "tune",
        "Searches the peak learning rate, its factors for encoder and decoder, and the warm-up, with a third of the\n"
        "recipe's layers. (The peak is the embeddings' rate, so each part has one of its own.) Chooses by what the\n"
        "source is worth: the loss with another sentence's source less that with its own. The loss itself would\n"
        "choose rates at which the encoder collapses; it decides only for tasks without that measure. The best are\n"
        "repeated with other seeds and then tried on the deep model, at lower rates, too.\n\n"
        "Reads the prepared data. Writes a recipe with the changed settings, and into RUN/tune every trial\n"
        "(trials.jsonl), the table (tune.md) and a picture (tune.png). Stopped, the same command goes on.",
        "deepnmt tune my.yaml\n"
        "deepnmt tune my.yaml --minutes 60 --write fast.yaml",
    )
    add = parser.add_argument
    add("--runs", type=int, metavar="N",
        help=f"trials in all, {LEAST} or more (default {RUNS}; with --minutes as many as fit)")
    add("--minutes", type=float, metavar="N",
        help="begin no trial that would end later; the trials of stopped calls count")
    add("--updates", type=int, metavar="N",
        help="updates of a full trial; the search's first trials take half (default: a quarter of train.updates, but "
        "300 to 2,000)")
    add("--seeds", type=int, default=3, metavar="N", help="seeds of the best two on the small copy (default 3)")
    add("--processes", type=int, default=1, metavar="N",
        help="data-parallel processes that training will use; a trial's updates are then as large (default 1)")
    add("--write", type=Path, metavar="FILE", help="the recipe to write (default: NAME_tuned.yaml beside the recipe)")
    add("--replace", action="store_true", help="write it even if a file of that name exists")
    args, recipe = parse(parser, words)
    positive(args, "seeds", "processes")
    if args.runs is not None and args.runs < LEAST:
        raise UserError(f"--runs is {args.runs}, must be {LEAST} or more, for the search and the deep model")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise UserError(f"--minutes is {args.minutes:g}, must be above 0")
    if args.updates is not None and not 2 <= args.updates <= recipe.train.updates:
        raise UserError(f"--updates is {args.updates}, must be from 2 to train.updates ({recipe.train.updates})")
    if recipe.train.init_from is not None:
        raise UserError(f"train.init_from is {recipe.train.init_from}, but tune trains smaller models from new "
                        "weights; add train.init_from=null train.grow=null")
    from deepnmt.processes.process_group import rank_from_environment

    count = rank_from_environment()[1]
    if count > 1:
        raise UserError(f"tune was started on {count} processes, but it trains one model after the other in one; start "
                        "it alone, and say with --processes how many training will use")
    from deepnmt.extras.tune.plan import Budget
    from deepnmt.extras.tune.tune import tune

    quarter = max(300, min(2000, recipe.train.updates // 4))
    updates = args.updates or min(recipe.train.updates, quarter)
    if args.minutes is None:
        budget = Budget(args.runs or RUNS, math.inf, max(2, updates), args.seeds)
    else:
        budget = Budget(args.runs or MOST, 60 * args.minutes, max(2, updates), args.seeds)
    print(tune(recipe, budget, args.recipe, args.write, processes=args.processes, replace=args.replace))


GROUP = EXAMINE
BEFORE = "consolidate"  # where these are listed
COMMANDS: dict[str, Command] = {"tune": tune}
