"""The commands for classifiers: `classify` and `seeds`."""

from __future__ import annotations

import sys

from deepnmt.arguments import numbers, parse, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.commands.options import add_checkpoint, checkpoint_of, processes_of
from deepnmt.errors import UserError


def classify(words: list[str]) -> None:
    """Say of texts which label they have, with a trained classifier."""
    parser = recipe_parser(
        "classify",
        "Writes a line for each line of the input: its likeliest label and the probability of every label, separated\n"
        "by tabs. The input has the columns of the recipe's data.columns.\n\n"
        "Reads a checkpoint of the run and a file. Writes a file or standard output.",
        "deepnmt classify runs/my --input in.tsv --output labels.tsv\n"
        "deepnmt classify runs/my --checkpoint best --input test.tsv --output labels.tsv --score",
    )
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="the texts: lines with tabs, or JSON lines (.jsonl)")
    add("--output", default="-", metavar="FILE", help="the file of the labels (default: standard output)")
    add("--score", action="store_true", help="compare with the labels in the input, and print accuracy, F1 and "
        "Matthews' correlation")
    add_checkpoint(parser)
    args, recipe = parse(parser, words)
    settable(args, ["run", "parallel.device", "parallel.threads"], "a trained classifier is used as it is")
    from deepnmt.tasks.classify.predict import classify_file, require_classifier

    require_classifier(recipe)
    checkpoint = checkpoint_of(args.checkpoint, recipe)
    with processes_of(recipe) as ranks:
        if ranks.first:
            scores = classify_file(checkpoint or recipe.run, args.input, args.output, ranks.device, args.score)
            if scores:
                print(scores, file=sys.stderr if args.output == "-" else sys.stdout)  # the labels are there


def seeds(words: list[str]) -> int:
    """Train a classifier with several seeds, and tell mean and 95 % interval."""
    parser = recipe_parser(
        "seeds",
        "Trains a recipe of task: classify once with each seed, and prints accuracy, F1 and Matthews' correlation of\n"
        "each at its last validation, with the mean and its 95 % interval (Student's t). Called again, it resumes.\n\n"
        "Reads the examples. Writes RUN/seed-N, a run for each, and RUN/seeds.json.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt seeds my.yaml\n"
        "deepnmt seeds my.yaml --seeds 1,2,3 train.updates=300",
        setting="train.updates=300",
    )
    parser.add_argument("--seeds", default="1,2,3,4,5,6", metavar="N,N,...", help="the seeds (default 1,2,3,4,5,6)")
    args, recipe = parse(parser, words)
    chosen = numbers("--seeds", args.seeds, ",") or []
    if len(set(chosen)) < max(2, len(chosen)) or min(chosen) < 0 or max(chosen) >= 2**31:
        raise UserError(f"--seeds is {args.seeds}, must be two or more different numbers from 0 to {2**31 - 1}")
    from deepnmt.tasks.classify.predict import require_classifier, train_seeds

    classifier = require_classifier(recipe)
    with processes_of(recipe, group=recipe.parallel.ds_config is not None) as ranks:
        return train_seeds(classifier, chosen, ranks)


GROUP = TEXT
COMMANDS: dict[str, Command] = {"classify": classify, "seeds": seeds}
