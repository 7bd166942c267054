"""The command `report`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import parse, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.config import Recipe, load_recipe
from deepnmt.errors import UserError


def report(words: list[str]) -> None:
    """Write a page about a run's scores and translations, or compare two runs."""
    parser = recipe_parser(
        "report",
        "Writes a page about a run that was evaluated: its learning curve, its scores, the ten best and worst\n"
        "sentences of each test set, and how it does on short and long sentences and on frequent and rare words. With\n"
        "a second run it also shows where the two differ.\n\n"
        "Reads RUN/scores.json and RUN/scores, which deepnmt evaluate writes, log.jsonl, and the training text, in\n"
        "which words are counted. Writes RUN/report.html, one file that needs no network.",
        "deepnmt report runs/my\n"
        "deepnmt report runs/my runs/other --output comparison.html",
        more="[RUN]",
    )
    add = parser.add_argument
    add("--scores", default="scores.json", metavar="NAME", help="the file of scores in the run (default scores.json)")
    add("--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    args, recipe = parse(parser, words)
    settable(args, ["run", "data"], "what was scored is shown as it is")
    if len(args.runs) > 1:
        raise UserError(f"report was given {1 + len(args.runs)} runs, but it compares two; give one or two")
    others = [load_recipe(run) for run in args.runs]
    for one in (recipe, *others):
        if one.task != Recipe.default("task"):
            raise UserError(f"{one.run} has task: {one.task}, but report shows translations beside their references; "
                            "give a run of translation")
    from deepnmt.extras.report.page import write_report

    print(write_report([recipe, *others], args.scores, args.output or Path(recipe.run) / "report.html"))


GROUP = TEXT
COMMANDS: dict[str, Command] = {"report": report}
