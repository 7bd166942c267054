"""The commands for a trained speech model: `translate`, `evaluate`."""

from __future__ import annotations

from deepnmt.arguments import expected_model, parse, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.commands.options import (
    CHECKPOINT,
    add_checkpoints,
    add_files,
    add_format,
    checkpoints_of,
    processes_of,
)
from deepnmt.errors import UserError


def translate(words: list[str]) -> None:
    """Write the text of recordings with a trained model."""
    parser = recipe_parser(
        "translate",
        "Recognises speech: line N of the output is the text of utterance N of a list, whose lines are paths of audio\n"
        "files. What follows a tab, such as a transcript, is not looked at.\n"
        "The recipe's translate section sets the search, and translate.NAME=VALUE changes it for this call.\n\n"
        "Reads a checkpoint of the run, and a file or standard input. Writes a file or standard output.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt translate runs/speech --input list.tsv --output out.txt\n"
        "deepnmt translate runs/speech --checkpoint best --input list.tsv --format jsonl translate.nbest=5",
        setting="translate.nbest=5",
    )
    add_files(parser, "the list, an audio file a line", "the file of the texts")
    add_format(parser)
    add_checkpoints(parser, CHECKPOINT)  # so that an ensemble is refused in a sentence
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("translate"), "a trained model recognises as it is")
    checkpoints = _one(checkpoints_of(args.checkpoint, recipe))
    from deepnmt.tasks.speech.recognise import recognise_list

    with processes_of(recipe) as ranks:
        recognise_list(checkpoints or recipe.run, args.input, args.output, recipe.translate, output_format=args.format,
                       ranks=ranks, expected=expected_model(args, recipe, checkpoints))


def evaluate(words: list[str]) -> None:
    """Score a trained speech model on test sets."""
    parser = recipe_parser(
        "evaluate",
        "Recognises the test sets of the recipe and prints the word and character error rates, in percent, with a\n"
        "signature.\n\n"
        "Reads a checkpoint of the run and the audio. Writes RUN/scores.json; scores of other test sets, checkpoints\n"
        "or settings go into a file beside it. The texts are kept in a folder of the file's name.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt evaluate runs/speech\n"
        "deepnmt evaluate runs/speech --checkpoint best --test clean translate.beam=10",
        setting="translate.beam=10",
    )
    parser.add_argument("--test", action="append", metavar="SET",
                        help="a name in data.test; repeat it for several (default: all)")
    add_checkpoints(parser, CHECKPOINT)  # so that an ensemble is refused in a sentence
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("evaluate"), "a trained model recognises as it is")
    checkpoints = _one(checkpoints_of(args.checkpoint, recipe))
    from deepnmt.tasks.speech.recognise import score_lists

    with processes_of(recipe) as ranks:
        table = score_lists(recipe, checkpoints or recipe.run, args.test or [], ranks,  # type: ignore[arg-type]
                            expected_model(args, recipe, checkpoints))
        if ranks.first:
            print(table)


def _one(checkpoints: list[str]) -> str:
    """The one checkpoint that is named; "" if none is. Raises `UserError` for several."""
    if checkpoints[1:]:
        raise UserError(f"--checkpoint {' '.join(checkpoints)} would make an ensemble, which task: speech does not "
                        "offer; name one")
    return checkpoints[0] if checkpoints else ""


GROUP = TEXT
COMMANDS: dict[str, Command] = {"translate": translate, "evaluate": evaluate}
