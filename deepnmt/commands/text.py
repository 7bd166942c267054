"""Commands that make training data, and the one of all steps: `run`, `split`, `prepare`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import parse, plain_parser, recipe_parser
from deepnmt.commands import TEXT, Command
from deepnmt.errors import UserError


def run(words: list[str]) -> int:
    """Take all steps of a recipe, from the texts to the scores."""
    parser = recipe_parser(
        "run",
        "Takes all steps of a recipe: prepare, train, average and evaluate. Before, it lets the models that the\n"
        "recipe names as translated_by translate their texts, for distillation and back-translation. If such a model\n"
        "is given by its recipe, that is run first.\n\n"
        "Prints each command it runs. Started again, it continues where it was stopped. It writes what these commands\n"
        "write, and beside each text that was translated a record of how, FILE.source.json.\n\n"
        "exit codes: 0, or that of the command that ended otherwise; 75 is training that was stopped and has saved",
        "deepnmt run my.yaml\n"
        "deepnmt run multi30k/student_6l-2l\n"
        'deepnmt run my.yaml --launcher "torchrun --nproc_per_node 8 -m deepnmt"',
    )
    parser.add_argument("--launcher", metavar="COMMAND", help="what starts training, translation and scoring on "
                        "several processes (default: one process)")
    args, recipe = parse(parser, words)
    from deepnmt.processes.process_group import rank_from_environment
    from deepnmt.steps import run_steps, starter

    if rank_from_environment()[1] > 1:
        raise UserError("deepnmt run starts processes by itself and was started by a launcher; start it as one process "
                        'with --launcher "COMMAND", for example --launcher "torchrun --nproc_per_node 2 -m deepnmt"')
    return run_steps(args.recipe, recipe, args.overrides, starter(args.launcher))


def split(words: list[str]) -> None:
    """Split a file of sentence pairs into training, validation and test texts."""
    parser = plain_parser(
        "split",
        "Splits a file of tab-separated sentence pairs into three texts that share no sentence, not even where a\n"
        "sentence has several translations.\n\n"
        "Reads TSV. Writes train, valid and test files, one for each language, into FOLDER, and prints the number of\n"
        "pairs in each.",
        "deepnmt split pairs.tsv.gz data/my/text --langs en de\n"
        "deepnmt split deu-eng.tsv.gz data/tatoeba/text --columns 2 1 --langs de en",
    )
    add = parser.add_argument
    add("tsv", metavar="TSV", type=Path, help="sentence pairs, one a line; plain, .gz, .xz, .zst or .bz2")
    add("folder", metavar="FOLDER", type=Path, help="the folder of the three texts")
    add("--columns", type=int, nargs=2, default=[1, 2], metavar=("SRC", "TRG"),
        help="columns of source and target, counted from 1 (default 1 2)")
    add("--langs", nargs=2, required=True, metavar=("SRC", "TRG"), help="language suffixes of the files written")
    add("--valid", type=int, default=10, metavar="N",
        help="target sentences to hold out of every 1,000 for validation (default 10)")
    add("--test", type=int, default=20, metavar="N",
        help="target sentences to hold out of every 1,000 for the test (default 20)")
    args = parser.parse_args(words)
    from deepnmt.data.split import split_tsv

    counts = split_tsv(args.tsv, args.folder, tuple(args.columns), tuple(args.langs), args.valid, args.test)
    print("pairs: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))


def prepare(words: list[str]) -> None:
    """Train the vocabulary and turn the texts into token arrays."""
    parser = recipe_parser(
        "prepare",
        "Trains the SentencePiece vocabulary, filters the training text and encodes all texts.\n\n"
        "Reads the texts that the recipe's data section names. Writes token arrays and vocabulary into data.folder.\n"
        "Data that are up to date stay as they are; data of other texts or settings are never overwritten.",
        "deepnmt prepare my.yaml\n"
        "deepnmt prepare my.yaml vocab.size=4000 data.folder=data/small\n"
        "deepnmt prepare my.yaml --part 3/8",
        setting="vocab.size=4000",
    )
    parser.add_argument("--part", metavar="I/N", default="", help="of text in shards (data.shard_pairs), prepare part "
                        "I of N, on as many machines as there are; each says when it is to be called again")
    args, recipe = parse(parser, words)
    from deepnmt.training.task import prepare

    print(prepare(recipe, args.part))


GROUP = TEXT
COMMANDS: dict[str, Command] = {"run": run, "split": split, "prepare": prepare}
