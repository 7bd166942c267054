"""The command `get`."""

from __future__ import annotations

from deepnmt.arguments import parse, recipe_parser
from deepnmt.commands import TEXT, Command


def get(words: list[str]) -> None:
    """Fetch the texts that a recipe names through mtdata or SacreBLEU."""
    parser = recipe_parser(
        "get",
        "Fetches the texts of a recipe that say where they come from: mtdata: [NAME, ...] or sacrebleu: NAME beside\n"
        "their src and trg. First it says their sizes and licences. Texts that are there already stay.\n\n"
        "Reads mtdata's index and the corpora's servers. Writes src and trg, and beside src a record of checksums,\n"
        "with which the same command on another machine gets the same text, or says that it has changed.\n"
        "Needs mtdata: pip install mtdata",
        "deepnmt get my.yaml --dry-run\n"
        "deepnmt get wmt14_en_de/60l-12l",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what there is to fetch, and fetch nothing")
    args, recipe = parse(parser, words)
    from deepnmt.extras.fetch.fetch import fetch_texts

    print(fetch_texts(recipe, only_say=args.dry_run))


REQUIREMENTS = ("mtdata",)
GROUP = TEXT
BEFORE = "split"  # where these are listed
COMMANDS: dict[str, Command] = {"get": get}
