"""The command `demo`."""

from __future__ import annotations

from deepnmt.arguments import parse, recipe_parser
from deepnmt.commands import TRY, Command


def demo(words: list[str]) -> None:
    """Train and score a deep model on a small artificial corpus."""
    parser = recipe_parser(
        "demo",
        "Takes every step from text to a score: writes a corpus with a small grammar, prepares it, trains under\n"
        "deepspeed on two processes, averages, translates and scores. Run it again and it reuses what it finds.\n\n"
        "Reads a recipe whose training texts are train.en and train.de, by default demo/admin_18l-18l, which comes\n"
        "with deepnmt. Writes these texts, the recipe's data.folder and its run folder, below the current folder.",
        "deepnmt demo\n"
        "deepnmt demo my.yaml --pairs 20000",
        default="demo/admin_18l-18l",
    )
    parser.add_argument("--pairs", type=int, default=110_000, metavar="N",
                        help="training pairs (default 110,000); with fewer than 10,000 the other texts shrink too")
    args, recipe = parse(parser, words)
    from deepnmt.extras.demo.run import run_demo

    run_demo(recipe, args.pairs)


GROUP = TRY
BEFORE = "check-cluster"  # where these are listed
COMMANDS: dict[str, Command] = {"demo": demo}
