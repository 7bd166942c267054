"""Commands for recipes: `recipes`, `copy`, `new`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import plain_parser
from deepnmt.commands import RECIPES, Command
from deepnmt.config import Recipe
from deepnmt.errors import UserError, nearest
from deepnmt.shipped import find_shipped, schema_of, shipped_recipes, task_of, tasks_of_recipes
from deepnmt.visitors import task_lines


def recipes(words: list[str]) -> None:
    """List the recipes that come with deepnmt."""
    plain_parser(
        "recipes",
        "Lists the recipes that come with deepnmt, by their task. Each name can be given wherever a command takes a\n"
        "RECIPE.",
        "deepnmt recipes",
    ).parse_args(words)
    titles, lines = shipped_recipes(), task_lines()
    by_task: dict[str, list[str]] = {}
    for name, task in tasks_of_recipes().items():
        by_task.setdefault(task, []).append(name)
    for task in sorted(by_task, key=lambda task: (task != Recipe.default("task"), task)):
        if task in lines:  # or its folder has been erased
            print(f"task: {task}, {lines[task]}")
            for name in by_task[task]:
                print(f"  {name:<25} {titles[name]}")


def copy(words: list[str]) -> None:
    """Copy one of them into a file of your own, to change it."""
    parser = plain_parser(
        "copy",
        "Copies a recipe that comes with deepnmt, so that you can change it. In front of it stands a line that tells\n"
        "editors with YAML support where the schema of its task is, so that they complete and check settings.",
        "deepnmt copy demo/admin_18l-18l my.yaml",
    )
    parser.add_argument("name", metavar="NAME", help="the recipe's name, as `deepnmt recipes` lists it")
    parser.add_argument("file", metavar="FILE", type=Path, help="the new file")
    args = parser.parse_args(words)
    if not (recipe := find_shipped(args.name)).is_file():
        near = nearest(args.name, shipped_recipes())
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"there is no recipe {args.name}; {hint}deepnmt recipes lists those that come with deepnmt")
    text = recipe.read_text(encoding="utf-8")
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        with args.file.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={schema_of(task_of(text))}\n{text}")
    except FileExistsError:
        raise UserError(f"{args.file} exists already; give another name, or remove it") from None
    except OSError as error:
        raise UserError(f"{args.file} cannot be written: {error.strerror}") from None


def new(words: list[str]) -> None:
    """Write a recipe for a text of your own."""
    parser = plain_parser(
        "new",
        "Looks at a parallel text, holds sentences out of it for validation and test, and writes a recipe for it,\n"
        "whose comments say why. docs/guide/new_recipe.md has the table it chooses from.\n\n"
        "Writes FILE, and training, validation and test text into data/NAME/text, where NAME is that of FILE.",
        "deepnmt new my.yaml --src corpus.de --trg corpus.en\n"
        "deepnmt new my.yaml --src corpus.txt.gz --trg corpus2.txt.gz --langs de en --machine gpu\n"
        "deepnmt new my.yaml --tsv pairs.tsv.gz --langs de en",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="the recipe, a name that ends in .yaml")
    add("--src", metavar="FILE", help="source sentences, one a line; plain, .gz, .xz, .zst or .bz2")
    add("--trg", metavar="FILE", help="their translations, line by line")
    add("--tsv", metavar="FILE", help="in place of both, a table: lines with tabs, JSON lines or Parquet; with --langs")
    add("--columns", nargs=2, metavar=("SRC", "TRG"), help="its columns, counted from 1 or by name (default: 1 2)")
    add("--langs", nargs=2, metavar=("SRC", "TRG"), help="languages (default: the suffixes of both files)")
    add("--valid", nargs=2, metavar=("SRC", "TRG"), help="a validation text of your own; needs --test")
    add("--test", nargs=2, metavar=("SRC", "TRG"), help="a test text of your own; needs --valid")
    add("--machine", choices=["cpu", "gpu"], help="where it will train (default: like this machine)")
    args = parser.parse_args(words)
    sides = [file for file in (args.src, args.trg) if file]
    if len(sides) != (0 if args.tsv else 2):
        raise UserError("give the text as --src and --trg, two files, or as --tsv, one table")
    if args.columns and not args.tsv:
        raise UserError("--columns are those of a table; add --tsv, or leave it out")
    if bool(args.valid) != bool(args.test):
        raise UserError("--valid and --test go together: give both texts, or neither, and sentences are held out")
    from deepnmt.config import Corpus
    from deepnmt.data.tables import JSON, PARQUET, kind_of
    from deepnmt.data.text import ending
    from deepnmt.new import new_recipe

    def language(name: str) -> str:
        suffix = ending(name)
        if not suffix.isalpha() or len(suffix) > 3:
            raise UserError(f"{name} does not end in a language such as .de; add --langs SRC TRG, for example "
                            "--langs de en")
        return suffix

    def text(files: list[str] | None) -> Corpus | None:
        return Corpus(src=[files[0]], trg=[files[1]]) if files else None

    if args.tsv:
        if not args.langs:
            raise UserError(f"{args.tsv} does not name the languages; add --langs SRC TRG, for example --langs de en")
        langs = tuple(args.langs)
        columns = [int(column) if column.isdecimal() else column for column in args.columns or ("1", "2")]
        if 0 in columns:
            raise UserError(f"--columns {' '.join(args.columns)} has 0, but columns are counted from 1")
        corpus = Corpus(tsv=[args.tsv], columns=columns)
    else:
        for name in sides:
            if kind_of(Path(name)) in (".tsv", PARQUET, *JSON):
                raise UserError(f"{name} is a table; give it as --tsv {name}, for both sides")
        langs = tuple(args.langs or map(language, (args.src, args.trg)))
        if (ending(args.trg), ending(args.src)) == langs and langs[0] != langs[1]:
            raise UserError(f"--langs {' '.join(langs)} is the other way round than {args.src} and {args.trg}; "
                            "exchange one of the two pairs")
        corpus = Corpus(src=[args.src], trg=[args.trg])
    print(new_recipe(args.file, corpus, langs, args.machine, text(args.valid), text(args.test)))


GROUP = RECIPES
COMMANDS: dict[str, Command] = {"recipes": recipes, "copy": copy, "new": new}
