"""The commands `export`, `import` and `fold`."""

from __future__ import annotations

from pathlib import Path

from deepnmt.arguments import parse, plain_parser, positive, recipe_parser, settable
from deepnmt.commands import EXAMINE, Command
from deepnmt.commands.options import add_checkpoint, checkpoint_of, processes_of
from deepnmt.errors import UserError, enough_memory
from deepnmt.extras.export.targets import EXPORTERS


@enough_memory()
def export(words: list[str]) -> None:
    """Write a trained model for CTranslate2, Hugging Face or ONNX, and prove it."""
    parser = recipe_parser(
        "export",
        "Writes a trained model in the form of another program, and compares the two on a text: the log-probability\n"
        "of every token of the references, greedy translations, and BLEU of a beam search. The folder is kept only\n"
        "if they are the same. Its README.md shows how to translate with it where deepnmt is not installed.\n\n"
        "  ctranslate2   CTranslate2, the fast engine for CPUs and GPUs; translate.backend=ctranslate2 uses it, too\n"
        "  huggingface   transformers: MarianMTModel (Post-LN) or PegasusForConditionalGeneration (Pre-LN)\n"
        "  onnx          two ONNX graphs, of any block\n"
        "  bert          transformers: BertForMaskedLM, of task: masked_lm with post_ln; equal logits are the proof\n"
        "  post_ln       a checkpoint of plain Post-LN, as deepnmt fold writes it\n\n"
        "Reads a checkpoint of the run and its validation text. Writes RUN/ctranslate2 and so on, or the folder that\n"
        "--output names.",
        "deepnmt export runs/my --to ctranslate2\n"
        "deepnmt export runs/my --to ctranslate2 --precision int8 --output runs/my/int8\n"
        "deepnmt export runs/my --to huggingface --checkpoint best --licence cc-by-4.0",
    )
    add = parser.add_argument
    add("--to", required=True, choices=list(EXPORTERS),
        help="the program, or the form")
    add_checkpoint(parser)
    add("--output", metavar="FOLDER", help="the folder to write (default: RUN/ctranslate2 and so on; RUN/folded)")
    add("--precision", default="fp32", choices=list(EXPORTERS["ctranslate2"].precisions),
        help="number format of the weights (default fp32; the others for ctranslate2); the comparison is made in "
        "fp32, and what the other costs is printed")
    add("--text", metavar="SRC,REF", help="two text files to compare on (default: the recipe's validation text)")
    add("--lines", type=int, default=1000, metavar="N",
        help="compare on the first N lines, and score the references of up to 200 (default 1000)")
    add("--licence", default="unknown", metavar="NAME",
        help="the model's licence, for its page, by its name on Hugging Face such as cc-by-4.0 (default unknown)")
    args, recipe = parse(parser, words)
    settable(args, ["run", "parallel.threads"], "a trained model is exported as it is")
    positive(args, "lines")
    if not args.licence.strip():
        raise UserError("--licence is empty, must be a name such as cc-by-4.0; leave it out if the licence is unknown")
    checkpoint = checkpoint_of(args.checkpoint, recipe)
    if EXPORTERS[args.to].checkpoint or EXPORTERS[args.to].encoder:
        for name in ("precision", "text", "lines", "licence"):
            if getattr(args, name) != parser.get_default(name):
                raise UserError(f"--{name} has no effect with --to {args.to}, which compares logits in float64; remove "
                                "it")
        if EXPORTERS[args.to].encoder:
            from deepnmt.extras.export.bert import export_bert

            print(export_bert(recipe, checkpoint, args.output))
            return
        from deepnmt.extras.export.post_ln import fold_run

        print(fold_run(recipe, checkpoint, args.output))
        return
    from deepnmt.extras.export.job import export_run

    with processes_of(recipe):
        print(export_run(recipe, args.to, checkpoint, args.output, precision=args.precision, text=args.text,
                         lines=args.lines, licence=args.licence))


@enough_memory()
def import_model(words: list[str]) -> None:
    """Import a model of Marian (OPUS-MT) or fairseq, or BERT, into a run."""
    parser = plain_parser(
        "import",
        "Makes a run of a model that Marian or fairseq has trained, to translate with, to export, or to fine-tune: a\n"
        "recipe with train.init_from and vocab.model naming the run begins with its weights and its vocabulary.\n\n"
        "Reads a folder: a Marian model in Hugging Face's layout (config.json, the weights, source.spm, target.spm,\n"
        "vocab.json), BERT in the same (vocab.txt), which becomes a run of task: masked_lm, or a fairseq checkpoint\n"
        "(.pt) with its dictionaries dict.*.txt and sentencepiece.bpe.model. No pickle is executed.\n\n"
        "Writes RUN/averaged, a checkpoint, and RUN/recipe.yaml.",
        "deepnmt import opus-mt-de-en runs/opus --langs de en",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the model")
    parser.add_argument("run", type=Path, metavar="RUN", help="the new run folder")
    parser.add_argument("--langs", nargs=2, metavar=("SRC", "TRG"),
                        help="the languages, where the folder does not say (default: as it says)")
    args = parser.parse_args(words)
    from deepnmt.extras.export.imports import import_run

    print(import_run(args.folder, args.run, args.langs))


@enough_memory()
def fold(words: list[str]) -> None:
    """Write a trained Admin or DeepNorm model as plain Post-LN."""
    parser = recipe_parser(
        "fold",
        "Writes a trained model as a plain Post-LN model with the same logits: the factors of Admin and DeepNorm are\n"
        "multiplied into the norms and matrices beside them. Stacks of other blocks stay as they are.\n\n"
        "Reads a checkpoint of the run. Writes RUN/folded, a checkpoint folder, or the one that --output names.",
        "deepnmt fold runs/my\n"
        "deepnmt fold runs/my --checkpoint best --output runs/my/folded-best",
    )
    add_checkpoint(parser)
    parser.add_argument("--output", metavar="FOLDER", help="the folder of the folded model (default: RUN/folded)")
    args, recipe = parse(parser, words)
    settable(args, ["run"], "a trained model is folded as it is")
    from deepnmt.extras.export.post_ln import fold_run

    print(fold_run(recipe, checkpoint_of(args.checkpoint, recipe), args.output))


REQUIREMENTS = ("ctranslate2", "transformers", "onnx", "onnxruntime")
GROUP = EXAMINE
BEFORE = "consolidate"  # where these are listed
COMMANDS: dict[str, Command] = {"export": export, "import": import_model, "fold": fold}
