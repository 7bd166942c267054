"""The commands for a trained language model: `translate`, `evaluate`, `score`, `sample`, `export`, `import`, `new`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deepnmt.arguments import expected_model, parse, plain_parser, positive, recipe_parser, settable
from deepnmt.commands import TEXT, Claim, Command
from deepnmt.commands.options import (
    add_checkpoint,
    add_checkpoints,
    add_files,
    checkpoint_of,
    checkpoints_of,
    metrics_of,
    processes_of,
    translate_text,
)
from deepnmt.config import Recipe
from deepnmt.config.choices import FORMATS, METRIC_FAMILIES, METRICS
from deepnmt.config.fields import either
from deepnmt.errors import UserError, enough_memory


def _require_pairs(recipe: Recipe, command: str, wanted: bool) -> None:
    """Raises `UserError` if the recipe is not of pairs, or if it is, where those are not `wanted`."""
    if wanted and not recipe.translates:
        raise UserError(f"{command} needs a model that was trained on pairs, but data.train of the recipe is a text of "
                        "one side; use deepnmt sample, or train on pairs, src and trg")
    if recipe.translates and not wanted:
        raise UserError(f"{command} is of texts of one side, but data.train of the recipe is pairs; use deepnmt "
                        "translate or evaluate")


def translate(words: list[str]) -> None:
    """Translate a text with a language model of pairs."""
    parser = recipe_parser(
        "translate",
        "Translates a text line by line with a decoder by itself that was trained on pairs. The recipe's translate\n"
        "section sets the search, and translate.NAME=VALUE changes it for this call.\n"
        "A file appears when it is complete; until then FILE.parts has what is done, and the same command goes on.\n\n"
        "Reads a checkpoint of the run, and a file or standard input. Writes a file or standard output.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt translate runs/pairs --input in.txt --output out.txt\n"
        "deepnmt translate runs/pairs --input in.txt translate.beam=8",
        setting="translate.beam=8",
    )
    add = parser.add_argument
    add_files(parser, "the text, a sentence a line; plain, .gz, .xz, .zst or .bz2", "the file of the translations")
    add("--part", metavar="I/N", help="translate part I of N, on as many machines as there are")
    add("--format", default="text", choices=list(FORMATS), help="as for task: translation (default text)")
    add("--prefix", metavar="FILE", help="what each translation begins with, a line for each of the input")
    add_checkpoints(parser)
    add("--references", metavar="FILE", help="with translate.choose=chrf, or a metric whose command has {ref}: "
        "translations that are there already, a line for each of the input")
    parser.set_defaults(alignments=None)  # of an encoder's tokens
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("translate"), "a trained model translates as it is")
    _require_pairs(recipe, "translate", True)
    translate_text(args, recipe)


def evaluate(words: list[str]) -> None:
    """Measure a language model's perplexity on test texts, or score its translations."""
    parser = recipe_parser(
        "evaluate",
        "Measures a language model on the recipe's test texts, or the validation text if it has none: perplexity a\n"
        "word and a token, and bits a byte. A window of data.block tokens slides over the text, and with --context N\n"
        "each token is predicted from at least N before it.\n"
        "A model of pairs translates the test sets instead, and SacreBLEU scores the translations.\n\n"
        "Reads a checkpoint of the run and the prepared text, or the test sets. Prints a table and writes\n"
        "RUN/perplexity.json, or RUN/scores.json; what other texts, checkpoints or settings give goes into a file\n"
        "beside it.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt evaluate runs/my\n"
        "deepnmt evaluate runs/my --checkpoint best --context 400 data.block=512\n"
        "deepnmt evaluate runs/my --test valid",
        setting="data.block=512",
    )
    add = parser.add_argument
    add("--test", action="append", metavar="NAME", help="a test text's name in data.test, or valid (of texts of one "
        "side); repeat it for several (default: all of data.test)")
    add("--context", type=int, default=0, metavar="N", help="tokens before each that it is predicted from at least, "
        "below data.block (default 0: windows that do not overlap)")
    add("--metric", action="append", metavar="NAME", help=f"of pairs: {either([*METRICS, *METRIC_FAMILIES])}; repeat "
        "it for several (default: bleu, chrf, ter)")
    add_checkpoints(parser)
    args, recipe = parse(parser, words)
    settable(args, recipe.marked("evaluate"), "a trained model predicts as it is")
    if args.context and recipe.translates:
        raise UserError("--context is of texts of one side, but the recipe has pairs; leave it out")
    if args.metric and not recipe.translates:
        raise UserError("--metric is of pairs, but the recipe has texts of one side; leave it out")
    checkpoints = checkpoints_of(args.checkpoint, recipe)
    if recipe.translates:
        _score_translations(args, recipe, checkpoints)
        return
    if checkpoints[1:]:
        raise UserError("several --checkpoint are an ensemble, which is of pairs, but the recipe has texts of one "
                        "side; name one")
    from deepnmt.tasks.language_model.scoring import evaluate_run

    with processes_of(recipe) as ranks:
        table = evaluate_run(recipe, args.test, args.context, checkpoints[0] if checkpoints else None, ranks,
                             expected_model(args, recipe, checkpoints))
        if ranks.first:
            print(table)


def _score_translations(args: Namespace, recipe: Recipe, checkpoints: list[str]) -> None:
    """Prints the scores of a model of pairs on test sets."""
    from deepnmt.evaluate.evaluate import evaluate_run

    metrics = metrics_of(args.metric, recipe, METRICS.where(lambda metric: metric.usual))
    with processes_of(recipe) as ranks:
        table = evaluate_run(recipe, args.test, checkpoints=checkpoints, metrics=metrics,
                             expected=expected_model(args, recipe, checkpoints), ranks=ranks)
        if ranks.first:
            print(table)


def score(words: list[str]) -> None:
    """Tell how likely a language model finds lines of text."""
    parser = recipe_parser(
        "score",
        "Scores text: the log-probability (in nats) of each line, its end included, as a text of its own. The\n"
        "perplexity a word and a token are printed at the end.\n\n"
        "Reads a checkpoint of the run, and a file or standard input. Writes a file or standard output.",
        "deepnmt score runs/my --input lines.txt\n"
        "deepnmt score runs/my --pieces < lines.txt",
    )
    add_files(parser, "the lines; plain, .gz, .xz, .zst or .bz2", "the file of the scores")
    parser.add_argument("--pieces", action="store_true",
                        help="an object a line in JSON, with the log-probability of every piece")
    add_checkpoint(parser)
    args, recipe = parse(parser, words)
    settable(args, ["run", "batch.tokens", "parallel.device", "parallel.threads"], "a trained model scores as it is")
    _require_pairs(recipe, "score", False)
    from deepnmt.tasks.language_model.scoring import score_file

    with processes_of(recipe) as ranks:
        score_file(recipe, args.input, args.output, args.pieces, checkpoint_of(args.checkpoint, recipe), ranks)


def sample(words: list[str]) -> None:
    """Let a language model continue a text."""
    parser = recipe_parser(
        "sample",
        "Continues a prompt, token by token, each drawn from the model's probabilities. The same seed draws the\n"
        "same.\n\n"
        "Reads a checkpoint of the run. Prints each continuation, with the prompt in front.",
        "deepnmt sample runs/my --prompt 'The president of the'\n"
        "deepnmt sample runs/my --prompt 'Once upon a time' --tokens 100 --temperature 0.8 --top-p 0.9 --count 3",
    )
    add = parser.add_argument
    add("--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)")
    add("--tokens", type=int, default=50, metavar="N", help="tokens to draw (default 50)")
    add("--count", type=int, default=1, metavar="N", help="continuations (default 1)")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides the logits; below 1 likely tokens become "
        "likelier (default 1)")
    add("--top-k", type=int, default=0, metavar="K", help="draw only from the K likeliest tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw only from the likeliest tokens that together have "
        "this probability (default 1)")
    add_checkpoint(parser)
    args, recipe = parse(parser, words)
    settable(args, ["run", "seed", "parallel.device", "parallel.threads"], "a trained model continues as it is")
    _require_pairs(recipe, "sample", False)
    positive(args, "tokens", "count")
    if not 1e-6 <= args.temperature <= 1e6 or args.top_k < 0 or not 0 < args.top_p <= 1:
        raise UserError(f"--temperature is {args.temperature:g}, --top-k {args.top_k} and --top-p {args.top_p:g}; give "
                        "a temperature of 1e-6 to 1e6, a top-k of 0 or more, and a top-p above 0 and at most 1")
    from deepnmt.tasks.language_model.scoring import sample_text

    with processes_of(recipe) as ranks:
        texts = sample_text(recipe, args.prompt, args.count, args.tokens, args.temperature, args.top_k, args.top_p,
                            checkpoint_of(args.checkpoint, recipe), ranks)
        if ranks.first:
            print(*texts, sep="\n")


@enough_memory()
def export(words: list[str]) -> None:
    """Write a trained language model for Hugging Face transformers."""
    parser = recipe_parser(
        "export",
        "Writes a trained language model for transformers, as GPT2LMHeadModel (pre_ln, layer_norm, sinusoidal\n"
        "positions) or LlamaForCausalLM (pre_ln, rms_norm, rotary positions, swiglu). A text begins with </s>.\n\n"
        "Reads a checkpoint of the run. Writes RUN/huggingface, or the folder that --output names.",
        "deepnmt export runs/my --to huggingface",
    )
    parser.add_argument("--to", required=True, choices=["huggingface"], help="the library")
    add_checkpoint(parser)
    parser.add_argument("--output", metavar="FOLDER", help="the folder to write (default: RUN/huggingface)")
    args, recipe = parse(parser, words)
    settable(args, ["run", "parallel.threads"], "a trained model is exported as it is")
    import torch

    from deepnmt.tasks.language_model.huggingface import export_model
    from deepnmt.tasks.language_model.model import load

    loaded = load(Path(checkpoint_of(args.checkpoint, recipe) or recipe.run), torch.device("cpu"))
    print(export_model(loaded, Path(args.output or Path(recipe.run) / "huggingface")))


@enough_memory()
def import_model(words: list[str]) -> None:
    """Import a language model of Hugging Face's into a run."""
    parser = plain_parser(
        "import",
        "Makes a run of a language model of Hugging Face's, of GPT-2's or Llama's shape, to sample from, to score\n"
        "with or to fine-tune by train.init_from.\n\n"
        "Reads a folder: config.json, model.safetensors and tokenizer.model, a SentencePiece model. Writes\n"
        "RUN/averaged, a checkpoint, and RUN/recipe.yaml.",
        "deepnmt import llama-small runs/llama",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the model")
    parser.add_argument("run", type=Path, metavar="RUN", help="the new run folder")
    args = parser.parse_args(words)
    from deepnmt.tasks.language_model.huggingface import import_model

    print(import_model(args.folder, args.run))


def new(words: list[str]) -> None:
    """Write a recipe for a text of your own."""
    parser = plain_parser(
        "new",
        "Looks at a text, holds parts out of it for validation and test, and writes a recipe of a language model for\n"
        "it, whose comments say why.\n\n"
        "Writes FILE, and training, validation and test text into data/NAME/text, where NAME is that of FILE.",
        "deepnmt new my.yaml --text corpus.en.gz",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="the recipe, a name that ends in .yaml")
    add("--text", metavar="FILE", required=True, help="the text, a sentence or paragraph a line; documents may be "
        "separated by empty lines; plain, .gz, .xz, .zst or .bz2")
    add("--machine", choices=["cpu", "gpu"], help="where it will train (default: like this machine)")
    args = parser.parse_args(words)
    from deepnmt.tasks.language_model.new import new_recipe

    print(new_recipe(args.file, args.text, args.machine))


def _has_text(words: Sequence[str]) -> bool:
    """Whether `new` is given a text of one language."""
    return any(word.partition("=")[0] == "--text" for word in words)


def _is_ours(words: Sequence[str]) -> bool:
    """Whether `import` is given a folder with a language model."""
    for word in words:
        file = Path(word) / "config.json"
        if not word.startswith("-") and file.is_file():
            with suppress(OSError, ValueError, AttributeError):
                return json.loads(file.read_bytes()).get("model_type") in ("gpt2", "llama")
    return False


GROUP = TEXT
COMMANDS: dict[str, Command] = {"translate": translate, "evaluate": evaluate, "score": score, "sample": sample,
                                "export": export, "import": import_model, "new": new}
CLAIMS: dict[str, Claim] = {"import": _is_ours, "new": _has_text}
