"""The commands for a trained translation model: `translate`, `score`, `evaluate`."""

from __future__ import annotations

from deepnmt.arguments import expected_model, parse, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.commands.options import (
    add_checkpoints,
    add_files,
    add_format,
    checkpoints_of,
    metrics_of,
    processes_of,
    translate_text,
)
from deepnmt.config import load_recipe
from deepnmt.config.choices import FORMATS, METRIC_FAMILIES, METRICS
from deepnmt.config.fields import either
from deepnmt.config.plugins import is_named
from deepnmt.errors import UserError
from deepnmt.progress import print_status


def translate(words: list[str]) -> None:
    """Translate a text with a trained model."""
    parser = recipe_parser(
        "translate",
        "Translates a text line by line: line N of the output is the translation of line N of the input.\n"
        "The recipe's translate section sets the search, and translate.NAME=VALUE changes it for this call.\n"
        "Lines from a pipe are answered as they come, so a program can write one and read its translation.\n"
        "A file appears when it is complete; until then FILE.parts has what is done, and the same command goes on.\n\n"
        "Reads a checkpoint of the run, and a file or standard input. Writes a file or standard output.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt translate runs/my --input in.txt --output out.txt\n"
        "deepnmt translate runs/my --checkpoint best translate.beam=8 < in.txt\n"
        "deepnmt translate runs/my --input in.txt --format jsonl translate.beam=5 translate.nbest=5\n"
        "deepnmt translate runs/my --checkpoint best --checkpoint runs/other --input in.txt --output out.txt\n"
        "deepnmt translate runs/my --input in.txt --prefix begin.txt --output out.txt\n"
        "deepnmt translate runs/my --input in.de.zst --output out.en.zst --part 3/8",
        setting="translate.beam=8",
    )
    add = parser.add_argument
    add_files(parser, "the text, a sentence a line; plain, .gz, .xz, .zst or .bz2",
              "the file of the translations, compressed as its name says")
    add("--part", metavar="I/N", help="translate part I of N, on as many machines as there are; the last one to end "
        "writes the output")
    add_format(parser)
    add("--prefix", metavar="FILE", help="what each translation begins with, tags included: a line for each line of "
        "the input, empty where nothing is given")
    add("--references", metavar="FILE", help="translations that are there already, for translate.choose=chrf or a "
        "metric whose command has {ref}: a line for each line of the input")
    add("--alignments", metavar="FILE", help="a file for the word alignments of the translations, as 0-0 1-2, from the "
        "cross-attention of translate.alignment_layer; jsonl has them too")
    add_checkpoints(parser)
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("translate"), "a trained model translates as it is")
    translate_text(args, recipe)


def score(words: list[str]) -> None:
    """Tell how likely a model finds translations that you give it."""
    parser = recipe_parser(
        "score",
        "Scores given translations: the log-probability (in nats) that the model gives to each, end of sentence\n"
        "included. The mean over all tokens and the perplexity are printed at the end.\n\n"
        "The input has a sentence a line and --translations names the file with their translations. Or each line of\n"
        "the input is a sentence and any number of translations, separated by tabs. For lines with several, as in\n"
        "contrastive test sets, the share of lines whose first is the likeliest is printed.\n\n"
        "Reads a checkpoint of the run, and files or standard input. Writes a file or standard output.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt score runs/my --input in.txt --translations out.txt\n"
        "deepnmt score runs/my --input in.txt --translations nbest.jsonl --format jsonl --pieces --top 5\n"
        "deepnmt score runs/my --checkpoint best < contrastive.tsv",
    )
    add = parser.add_argument
    add_files(parser, "the sentences, with their translations if --translations is not given; plain, .gz, .xz, .zst "
              "or .bz2", "the file of the scores")
    add("--translations", metavar="FILE", help="a translation a line; or, where the name ends in .jsonl (.jsonl.gz, "
        "...), what deepnmt translate --format jsonl wrote, whose pieces are scored as they are")
    add_format(parser, "scores")
    add("--pieces", action="store_true", help="with tsv or jsonl: the log-probability of every subword piece")
    add("--top", type=int, default=0, metavar="N", help="beside each piece, the N likeliest there (default 0)")
    add_checkpoints(parser)
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("score"), "a trained model scores as it is")
    if args.pieces and not FORMATS[args.format].many:
        raise UserError(f"--pieces has no effect here because --format {args.format} holds a number for each "
                        f"translation; choose --format {either(FORMATS.where(lambda row: row.many))}")
    if args.top < 0 or (args.top and not args.pieces):
        raise UserError(f"--top is {args.top}, must be 0 or more, and needs --pieces")
    checkpoints = checkpoints_of(args.checkpoint, recipe)
    from deepnmt.decode.score import score_files

    with processes_of(recipe) as ranks:
        score_files(checkpoints or recipe.run, args.input, args.translations, args.output, recipe.translate,
                    output_format=args.format, pieces=args.pieces, top=args.top, ranks=ranks,
                    expected=expected_model(args, recipe, checkpoints))


def evaluate(words: list[str]) -> None:
    """Score a model, or ready translations, with SacreBLEU."""
    parser = recipe_parser(
        "evaluate",
        "Translates the recipe's test sets (or those of --test) and scores the result. Further runs are compared with\n"
        "the first on its test sets. With --hypotheses it scores ready translations instead, and compares several\n"
        "systems. Scores are SacreBLEU's, each with its signature; p is by approximate randomization.\n\n"
        "Reads a checkpoint of the run and the test sets. Prints a table and writes RUN/scores.json; scores of other\n"
        "test sets, checkpoints, runs, metrics or settings go into a file beside it. Sources, references and\n"
        "translations are kept in a folder of the file's name, as NAME.src, NAME.ref and NAME.hyp.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt evaluate runs/my\n"
        "deepnmt evaluate runs/my --checkpoint best --test mine=test.en,test.de\n"
        "deepnmt evaluate runs/my --hypotheses baseline=a.de --hypotheses ours=b.de\n"
        "deepnmt evaluate runs/my runs/other --checkpoint best --metric bleu --metric chrf++",
        more="[RUN ...]",
    )
    add = parser.add_argument
    add("--test", action="append", metavar="SET",
        help="a test set: a name in data.test, NAME=SRC,REF (two text files), or a name of SacreBLEU's such as "
        "wmt14/full; repeat it for several (default: all of data.test)")
    add("--hypotheses", action="append", metavar="SYSTEM=FILE[,FILE...]",
        help="score these translations of the test sets, a file for each set; repeat it to compare systems with the "
        "first one")
    add("--metric", action="append", metavar="NAME",
        help=f"{either([*METRICS])}, or {either(METRIC_FAMILIES)} for all that begin so; flores101 and flores200 are "
        "BLEU over FLORES's pieces, whose vocabulary SacreBLEU downloads; or one of the recipe's metrics; repeat it "
        "for several (default: bleu, chrf, ter, and those whose command you give)")
    add_checkpoints(parser)
    add("--output", metavar="FILE", help="the JSON file of the scores (default: RUN/scores.json or one beside it)")
    args, recipe = parse(parser, words)
    named = args.checkpoint or ["newest"]
    if args.runs and (named[1:] or named[0] not in ("best", "newest", "averaged")):
        raise UserError(f"--checkpoint {' '.join(args.checkpoint)} names checkpoints of one run, but "
                        f"{1 + len(args.runs)} runs are given; take best, newest or averaged, which every run has")
    if args.hypotheses:
        settable(args, recipe.marked("evaluate --hypotheses"), "ready translations are scored")
    else:
        settable(args, recipe.marked("evaluate"), "a trained model translates as it is")
    checkpoints = checkpoints_of(args.checkpoint, recipe)
    from deepnmt.evaluate.evaluate import evaluate_run

    usual = list(METRICS.where(lambda metric: metric.usual))
    for name, metric in recipe.metrics.items():
        if is_named(metric.command):
            usual.append(name)
        elif not args.metric:
            print_status(f"metrics.{name} is left out: beside a run a recipe's command is code, and runs only if you "
                         "give it on the command line, too")
    metrics = metrics_of(args.metric, recipe, usual)
    others = {}
    for run in args.runs:
        other = load_recipe(run, args.overrides)
        name = run
        if args.checkpoint:
            name = checkpoints_of(args.checkpoint, other)[0]
        others[name] = other
    with processes_of(recipe) as ranks:
        table = evaluate_run(recipe, tests=args.test, hypotheses=args.hypotheses, checkpoints=checkpoints,
                             others=others, metrics=metrics, output=args.output,
                             expected=expected_model(args, recipe, checkpoints), ranks=ranks)
        if ranks.first:
            print(table)


GROUP = TEXT
COMMANDS: dict[str, Command] = {"translate": translate, "score": score, "evaluate": evaluate}
