"""Every command of `deepnmt`, a function each. torch is imported only once the arguments have been checked."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from deepnmt.arguments import (
    expected_model,
    numbers,
    parse,
    plain_parser,
    positive,
    profiled,
    recipe_parser,
    settable,
)
from deepnmt.config import Recipe, load_recipe
from deepnmt.errors import UserError, nearest
from deepnmt.shipped import SCHEMA, find_shipped, shipped_recipes
from deepnmt.version import __version__

if TYPE_CHECKING:
    from deepnmt.processes.ranks import Ranks

Command = Callable[[list[str]], int | None]  # from the words after its name to the exit code (None: 0)

# Requirements that an installation for inference leaves out, and those of the extras.
_FOR_TRAINING = ("deepspeed", "filelock", "matplotlib", "tensorboard")
_OF_EXTRAS = ("ctranslate2", "transformers", "onnx", "onnxruntime", "mtdata", "uvicorn")
INTERRUPTED = 130  # what a shell reports of a program that SIGINT ended


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """`deepnmt COMMAND ...`; see `run_command`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if command is None and words[:1] in (["--version"], ["-V"]):
        print(versions())
        return 0
    return run_command("deepnmt", COMMANDS, OVERVIEW, command, words)


def run_command(
    program: str, commands: Mapping[str, Command], overview: str, command: str | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs `command`, or the one the first argument names; `overview` is what `--help` prints.

    Returns:
        The exit code: 0, 2 for a user's mistake, 130 for Ctrl-C (at which a training run saves and stops), or the
        command's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [w for w in words if not w.startswith(("--local_rank", "--local-rank"))]  # launchers add it; RANK is read
    if command is None:
        if not words or words[0] in ("-h", "--help"):
            print(overview)
            return 0 if words else 2
        command, words = words[0], words[1:]
    try:
        if command not in commands:
            if program == "deepnmt" and command in MOVED:
                raise UserError(f"the command {command} has become {MOVED[command]}")
            near = nearest(command, commands)
            hint = f"; did you mean {near}? see" if near else "; see"
            raise UserError(f"unknown command {command!r}{hint} {program} --help")
        try:
            return commands[command](words) or 0
        except ModuleNotFoundError as error:
            if error.name not in (*_FOR_TRAINING, *_OF_EXTRAS):
                raise
            missing = [name for name in _FOR_TRAINING if find_spec(name) is None]
            if error.name not in missing:
                missing = [error.name]
            raise UserError(f"{command} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                            f"installed here; run pip install {' '.join(missing)}") from None
    except UserError as error:
        if not (_is_later_process() if error.reported is None else error.reported):
            print(f"deepnmt: {error}", file=sys.stderr, flush=True)
        if _is_on_several_machines() and error.reported is None:
            from deepnmt.processes.launch import end_others

            end_others(str(error))
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        if not _is_later_process():
            print("deepnmt: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def overview_of(program: str, groups: Mapping[str, Mapping[str, Command]], end: str) -> str:
    """What `--help` prints: every command with the first line of its docstring, under the headline of its group."""
    lines = [f"usage: {program} COMMAND ...", f"       {program} COMMAND --help"]
    for headline, commands in groups.items():
        lines += ["", f"{headline}:", *(f"  {name:<15}{run.__doc__}" for name, run in commands.items())]
    return "\n".join([*lines, "", end])


def versions() -> str:
    """deepnmt's version and those of the libraries that compute, which are not imported for it."""
    from importlib.metadata import PackageNotFoundError, version

    lines = [f"deepnmt {__version__}"]
    for name in ("torch", "deepspeed"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def _is_later_process() -> bool:
    """Whether a launcher says that this is not the first process on its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"


def _is_on_several_machines() -> bool:
    """Whether a launcher says so: those other machines may not see the same mistake."""
    env = os.environ
    here = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", env.get("WORLD_SIZE", "1"))))
    return here < int(env.get("WORLD_SIZE", "1")) or int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1


def _checkpoint(name: str | None, recipe: Recipe) -> str | None:
    """The folder that `--checkpoint` names, by its path or as one of the run's."""
    if name not in ("best", "newest", "averaged"):
        if name and not Path(name).exists() and (near := nearest(name, ("best", "newest", "averaged"))):
            raise UserError(f"there is no folder {name}; did you mean --checkpoint {near}?")
        return name
    from deepnmt.checkpoint.checkpoint import Which, find_checkpoint

    return str(find_checkpoint(Path(recipe.run), cast("Which", name)))


def _checkpoints(names: list[str] | None, recipe: Recipe) -> list[str]:
    """The folders that `--checkpoint`, which may be repeated, names."""
    return [cast(str, _checkpoint(name, recipe)) for name in names or ()]


_CHECKPOINT = ("best (by validation), newest, averaged, or the folder of a checkpoint (default: the run's average if "
               "there is one, else its newest checkpoint)")
_ENSEMBLE = _CHECKPOINT + "; repeat it for an ensemble of models with one vocabulary"


def _recipes(words: list[str]) -> None:
    """List the recipes that come with deepnmt."""
    plain_parser(
        "recipes",
        "Lists the recipes that come with deepnmt. Each name can be given wherever a command takes a RECIPE.",
        "deepnmt recipes",
    ).parse_args(words)
    for name, title in shipped_recipes().items():
        print(f"{name:<25} {title}")


def _copy(words: list[str]) -> None:
    """Copy one of them into a file of your own, to change it."""
    parser = plain_parser(
        "copy",
        "Copies a recipe that comes with deepnmt, so that you can change it. In front of it stands a line that tells\n"
        "editors with YAML support where the schema of recipes is, so that they complete and check settings.",
        "deepnmt copy demo/admin_18l-18l my.yaml",
    )
    parser.add_argument("name", metavar="NAME", help="the recipe's name, as `deepnmt recipes` lists it")
    parser.add_argument("file", metavar="FILE", type=Path, help="the new file")
    args = parser.parse_args(words)
    if not (recipe := find_shipped(args.name)).is_file():
        near = nearest(args.name, shipped_recipes())
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"there is no recipe {args.name}; {hint}deepnmt recipes lists those that come with it")
    text = f"# yaml-language-server: $schema={SCHEMA}\n{recipe.read_text(encoding='utf-8')}"
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        with args.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{args.file} exists already; give another name, or remove it") from None
    except OSError as error:
        raise UserError(f"{args.file} cannot be written: {error.strerror}") from None


def _new(words: list[str]) -> None:
    """Write a recipe for a text of your own."""
    parser = plain_parser(
        "new",
        "Looks at a parallel text, holds sentences out of it for validation and test, and writes a recipe for it,\n"
        "whose comments say why. docs/guide/new_recipe.md has the table it chooses from.\n\n"
        "Writes FILE, and training, validation and test text into data/NAME/text, where NAME is that of FILE.",
        "deepnmt new my.yaml --src corpus.de --trg corpus.en\n"
        "deepnmt new my.yaml --src corpus.txt.gz --trg corpus2.txt.gz --langs de en --machine gpu",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="the recipe, a name that ends in .yaml")
    add("--src", metavar="FILE", required=True, help="source sentences, one a line; plain, .gz, .xz, .zst or .bz2")
    add("--trg", metavar="FILE", required=True, help="their translations, line by line")
    add("--langs", nargs=2, metavar=("SRC", "TRG"), help="languages (default: the suffixes of both files)")
    add("--valid", nargs=2, metavar=("SRC", "TRG"), help="a validation text of your own; needs --test")
    add("--test", nargs=2, metavar=("SRC", "TRG"), help="a test text of your own; needs --valid")
    add("--machine", choices=["cpu", "gpu"], help="where it will train (default: like this machine)")
    args = parser.parse_args(words)
    if bool(args.valid) != bool(args.test):
        raise UserError("--valid and --test go together: give both texts, or neither, and sentences are held out")
    from deepnmt.config import Corpus
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

    langs = tuple(args.langs or map(language, (args.src, args.trg)))
    if (ending(args.trg), ending(args.src)) == langs and langs[0] != langs[1]:
        raise UserError(f"--langs {' '.join(langs)} is the other way round than {args.src} and {args.trg}; exchange "
                        "one of the two pairs")
    print(new_recipe(args.file, Corpus(src=[args.src], trg=[args.trg]), langs, args.machine,
                     text(args.valid), text(args.test)))


def _get(words: list[str]) -> None:
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
    from deepnmt.data.fetch import fetch_texts

    print(fetch_texts(recipe, only_say=args.dry_run))


def _split(words: list[str]) -> None:
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


def _prepare(words: list[str]) -> None:
    """Train the vocabulary and turn the texts into token arrays."""
    parser = recipe_parser(
        "prepare",
        "Trains the SentencePiece vocabulary, filters the training text and encodes all texts.\n\n"
        "Reads the texts that the recipe's data section names. Writes token arrays and vocabulary into data.folder.\n"
        "Data that are up to date stay as they are; data of other texts or settings are never overwritten.",
        "deepnmt prepare my.yaml\n"
        "deepnmt prepare my.yaml vocab.size=4000 data.folder=data/small",
    )
    _, recipe = parse(parser, words)
    from deepnmt.data.prepare import prepare

    print(prepare(recipe))


def _processes(recipe: Recipe, *, group: bool = False, differ: bool = False) -> AbstractContextManager[Ranks]:
    """The processes of this start, as the recipe has them; see `deepnmt.processes.launch.processes`."""
    from deepnmt.processes.launch import processes

    settings = recipe.parallel
    return processes(settings.threads, group=group, differ=differ, device=settings.device, wait=settings.start_timeout)


def _profile(words: list[str]) -> None:
    """Measure Admin's omega before training (training does it too)."""
    parser = recipe_parser(
        "profile",
        "Measures omega, Admin's weight of each residual connection, on the first batch of the training text.\n"
        "Training does the same when a run begins, so this is for a look beforehand.\n\n"
        "Reads the prepared data. Writes admin_profile.json and admin_profile.png into the run folder.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt profile my.yaml\n"
        "deepspeed --quiet --num_accelerators 2 --module deepnmt profile my.yaml",
    )
    _, recipe = parse(parser, words)
    from deepnmt.training.profile import profile

    with _processes(recipe) as ranks:
        path = profile(recipe, ranks)
        if ranks.first:
            print(path)


def _train(words: list[str]) -> int:
    """Train the model of a recipe, or resume its training."""
    parser = recipe_parser(
        "train",
        "Trains the model that a recipe describes. If the run folder already holds a checkpoint, training resumes\n"
        "from it.\n\n"
        "Reads the prepared data. Writes checkpoints, log.jsonl, TensorBoard files and STATUS.json into the run\n"
        "folder. Runs as one process, or as several under deepspeed, torchrun or srun.\n\n"
        "exit codes:\n"
        "    0  the run is finished\n"
        "    2  a mistake in the recipe, the data or the command line, or a run that diverged; a message says which\n"
        "   75  stopped by a signal (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C) or with its launcher, and saved; the same\n"
        "       command resumes\n"
        "   76  another process of the run has ended, was stopped or is cut off; the same command resumes from the\n"
        "       newest checkpoint\n"
        "  130  stopped by Ctrl-C before the first update",
        "deepnmt train my.yaml\n"
        "deepnmt train my.yaml model.encoder.block=b2t train.updates=300 --dry-run\n"
        "deepnmt train my.yaml --dry-run --card h100-80\n"
        "deepspeed --quiet --num_accelerators 2 --module deepnmt train my.yaml\n"
        "torchrun --nproc_per_node 2 -m deepnmt train my.yaml",
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="print the whole recipe, the model's size, memory and layout, and train nothing")
    parser.add_argument("--card", metavar="NAME", help="with --dry-run: the largest micro-batch for a GPU, by name and "
                        "memory, such as h100-80")
    args, recipe = parse(parser, words)
    profiled(args, recipe)
    if args.card is not None and not args.dry_run:
        raise UserError("--card has no effect without --dry-run; add it, or remove --card")
    if args.dry_run:
        from deepnmt.device import CARDS
        from deepnmt.training.plan import describe

        if args.card not in (None, *CARDS):
            raise UserError(f"--card is {args.card}, must be one of {', '.join(CARDS)}")
        print(describe(recipe, args.card))
        return 0
    from deepnmt.doctor.nonfinite import explain
    from deepnmt.doctor.training_probe import watch
    from deepnmt.training.trainer import train

    with _processes(recipe, group=recipe.parallel.ds_config is not None) as ranks:
        return train(recipe, ranks, watch=watch, explain=explain)


def _run(words: list[str]) -> int:
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
    from deepnmt.processes.launch import rank_from_environment
    from deepnmt.steps import run_steps, starter

    if rank_from_environment()[1] > 1:
        raise UserError("deepnmt run starts processes by itself and was started by a launcher; start it as one process "
                        'with --launcher "COMMAND", for example --launcher "torchrun --nproc_per_node 2 -m deepnmt"')
    return run_steps(args.recipe, recipe, args.overrides, starter(args.launcher))


def _status(words: list[str]) -> int:
    """Say how a run stands, by a sentence and an exit code."""
    parser = recipe_parser(
        "status",
        "Says how a run stands: running, finished, stopped, failed, or ended without a word. For scripts, since\n"
        "launchers do not always hand on how training ended.\n\n"
        "Reads STATUS.json and the lock of the run folder. Prints a line.\n\n"
        "exit codes:\n"
        "    0  finished\n"
        "    1  ended without saying so, or with a lost process; the same command resumes it\n"
        "    2  failed, or no training has begun there; the line says which\n"
        "    3  running\n"
        "   75  stopped by a signal or with its launcher, and saved; the same command resumes it",
        "deepnmt status runs/my\n"
        "deepnmt status my.yaml run=runs/other",
    )
    folder = Path(parser.parse_intermixed_args(words).recipe)
    if not folder.is_dir():  # a run that was killed early has no recipe yet
        folder = Path(parse(parser, words)[1].run)
    from deepnmt.training.status import run_status

    found = run_status(folder)
    print(found.sentence)
    return found.code


def _average(words: list[str]) -> None:
    """Average the weights of a run's checkpoints."""
    parser = recipe_parser(
        "average",
        "Averages the weights of several checkpoints into one model, which translate and evaluate then use.\n"
        "Without an option it takes the last average_last checkpoints, a setting of the recipe.\n\n"
        "Reads RUN/checkpoints. Writes RUN/averaged, a checkpoint folder, or the one that --output names.",
        "deepnmt average runs/my\n"
        "deepnmt average runs/my --best 3",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--last", type=int, metavar="N", help="the last N checkpoints")
    group.add_argument("--best", type=int, metavar="N", help="the N checkpoints with the best validation")
    group.add_argument("--updates", metavar="U,U,...", help="the checkpoints of these updates")
    group.add_argument("--range", metavar="FROM:TO", help="all checkpoints from update FROM to update TO")
    group.add_argument("--checkpoints", nargs="+", metavar="FOLDER",
                       help="these checkpoint folders, from any runs of the same model")
    parser.add_argument("--output", metavar="FOLDER", help="the folder of the average (default: RUN/averaged)")
    args, recipe = parse(parser, words)
    chosen = any(way is not None for way in (args.last, args.best, args.updates, args.range, args.checkpoints))
    settable(args, ["run", "model", *([] if chosen else ["average_last"])], "checkpoints are averaged as they are")
    updates = numbers("--updates", args.updates, ",")
    span = numbers("--range", args.range, ":")
    if span is not None and len(span) != 2:
        raise UserError(f"--range is {args.range!r}, must be FROM:TO, for example 800:1000")
    from deepnmt.checkpoint.average import average_run

    print(average_run(recipe, last=args.last, best=args.best, updates=updates,
                      span=None if span is None else (span[0], span[1]), folders=args.checkpoints,
                      output=args.output, model=expected_model(args, recipe, args.checkpoints)))


def _translate(words: list[str]) -> None:
    """Translate a text with a trained model."""
    parser = recipe_parser(
        "translate",
        "Translates a text line by line: line N of the output is the translation of line N of the input.\n"
        "The recipe's translate section sets the search, and translate.NAME=VALUE changes it for this call.\n"
        "Lines from a pipe are answered as they come, so a program can write one and read its translation.\n\n"
        "Reads a checkpoint of the run, and a file or standard input. Writes a file or standard output.\n"
        "Runs as one process, or as several under deepspeed, torchrun or srun.",
        "deepnmt translate runs/my --input in.txt --output out.txt\n"
        "deepnmt translate runs/my --checkpoint best translate.beam=8 < in.txt\n"
        "deepnmt translate runs/my --input in.txt --format jsonl translate.beam=5 translate.nbest=5\n"
        "deepnmt translate runs/my --checkpoint best --checkpoint runs/other --input in.txt --output out.txt\n"
        "deepnmt translate runs/my --input in.txt --prefix begin.txt --output out.txt",
    )
    add = parser.add_argument
    add("--input", default="-", metavar="FILE", help="the text, a sentence a line; plain, .gz, .xz, .zst or .bz2 "
        "(default: standard input)")
    add("--output", default="-", metavar="FILE", help="the file of the translations (default: standard output)")
    add("--format", default="text", choices=["text", "tsv", "jsonl"],
        help="text: the best translation of each line; tsv: line, rank, score and translation; jsonl: an object a "
        "line (default text)")
    add("--prefix", metavar="FILE", help="what each translation begins with, tags included: a line for each line of "
        "the input, empty where nothing is given")
    add("--alignments", metavar="FILE", help="a file for the word alignments of the translations, as 0-0 1-2, from the "
        "cross-attention of translate.alignment_layer; jsonl has them too")
    add("--checkpoint", action="append", metavar="WHICH", help=_ENSEMBLE)
    args, recipe = parse(parser, words)
    settable(args, ["run", "model", "translate", "seed", "parallel.threads", "parallel.device"],
             "a trained model translates as it is")
    checkpoints = _checkpoints(args.checkpoint, recipe)
    from deepnmt.decode.translate import translate_files

    with _processes(recipe) as ranks:
        translate_files(checkpoints or recipe.run, args.input, args.output, recipe.translate, prefixes=args.prefix,
                        alignments=args.alignments, output_format=args.format, seed=recipe.seed, ranks=ranks,
                        expected=expected_model(args, recipe, checkpoints))


def _score(words: list[str]) -> None:
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
    add("--input", default="-", metavar="FILE", help="the sentences, with their translations if --translations is not "
        "given; plain, .gz, .xz, .zst or .bz2 (default: standard input)")
    add("--translations", metavar="FILE", help="a translation a line; or, where the name ends in .jsonl, what "
        "deepnmt translate --format jsonl wrote, whose pieces are scored as they are")
    add("--output", default="-", metavar="FILE", help="the file of the scores (default: standard output)")
    add("--format", default="text", choices=["text", "tsv", "jsonl"],
        help="text: the log-probabilities of a line's translations; tsv: line, number, log-probability, score and "
        "translation; jsonl: an object a line (default text)")
    add("--pieces", action="store_true", help="with tsv or jsonl: the log-probability of every subword piece")
    add("--top", type=int, default=0, metavar="N", help="beside each piece, the N likeliest there (default 0)")
    add("--checkpoint", action="append", metavar="WHICH", help=_ENSEMBLE)
    args, recipe = parse(parser, words)
    settable(args, ["run", "model", "translate", "parallel.threads", "parallel.device"],
             "a trained model scores as it is")
    if args.pieces and args.format == "text":
        raise UserError("--pieces has no effect here because --format text holds a number for each translation; "
                        "choose --format tsv or jsonl")
    if args.top < 0 or (args.top and not args.pieces):
        raise UserError(f"--top is {args.top}, must be 0 or more, and needs --pieces")
    checkpoints = _checkpoints(args.checkpoint, recipe)
    from deepnmt.decode.score import score_files

    with _processes(recipe) as ranks:
        score_files(checkpoints or recipe.run, args.input, args.translations, args.output, recipe.translate,
                    output_format=args.format, pieces=args.pieces, top=args.top, ranks=ranks,
                    expected=expected_model(args, recipe, checkpoints))


_METRICS = ("bleu", "chrf", "ter", "chrf++", "flores101", "flores200")  # a copy of evaluate/metrics.py, `METRICS`


def _evaluate(words: list[str]) -> None:
    """Score a model, or ready translations, with SacreBLEU."""
    parser = recipe_parser(
        "evaluate",
        "Translates the recipe's test sets (or those of --test) and scores the result. Further runs are compared with\n"
        "the first on its test sets. With --hypotheses it scores ready translations instead, and compares several\n"
        "systems. Scores are SacreBLEU's, each with its signature; systems are compared by paired bootstrap.\n\n"
        "Reads a checkpoint of the run and the test sets. Prints a table and writes RUN/scores.json; scores of other\n"
        "test sets, checkpoints, runs or settings go into a file beside it. Sources, references and translations are\n"
        "kept in a folder of the file's name, as NAME.src, NAME.ref and NAME.hyp.\n"
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
        "first one by paired bootstrap")
    add("--metric", action="append", choices=_METRICS, metavar="NAME",
        help=f"{', '.join(_METRICS[:-1])} or {_METRICS[-1]}, the last two BLEU over FLORES's pieces, whose vocabulary "
        "SacreBLEU downloads; repeat it for several (default: bleu, chrf and ter)")
    add("--checkpoint", action="append", metavar="WHICH", help=_ENSEMBLE)
    add("--output", metavar="FILE", help="the JSON file of the scores (default: RUN/scores.json or one beside it)")
    args, recipe = parse(parser, words)
    named = args.checkpoint or ["newest"]
    if args.runs and (named[1:] or named[0] not in ("best", "newest", "averaged")):
        raise UserError(f"--checkpoint {' '.join(args.checkpoint)} names checkpoints of one run, but "
                        f"{1 + len(args.runs)} runs are given; take best, newest or averaged, which every run has")
    scored = ["run", "data.test", "data.src_lang", "data.trg_lang", "parallel.threads", "parallel.device"]
    if args.hypotheses:
        settable(args, scored, "ready translations are scored")
    else:
        settable(args, [*scored, "model", "translate", "seed"], "a trained model translates as it is")
    checkpoints = _checkpoints(args.checkpoint, recipe)
    from deepnmt.evaluate.evaluate import evaluate_run

    others = {}
    for run in args.runs:
        other = load_recipe(run, [f"run={json.dumps(run)}", *args.overrides])
        others[_checkpoints(args.checkpoint, other)[0] if args.checkpoint else run] = other
    with _processes(recipe) as ranks:
        table = evaluate_run(recipe, tests=args.test, hypotheses=args.hypotheses, checkpoints=checkpoints,
                             others=others, metrics=args.metric or _METRICS[:3], output=args.output,
                             expected=expected_model(args, recipe, checkpoints),
                             ranks=ranks)
        if ranks.first:
            print(table)


def _report(words: list[str]) -> None:
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
    from deepnmt.evaluate.report import write_report

    others = [load_recipe(run, [f"run={json.dumps(run)}"]) for run in args.runs]
    print(write_report([recipe, *others], args.scores, args.output or Path(recipe.run) / "report.html"))


def _serve(words: list[str]) -> None:
    """Translate for other programs and people, over HTTP."""
    parser = recipe_parser(
        "serve",
        "Translates over HTTP. Programs POST JSON to /translate, for example {\"text\": [\"a dog\", \"two cats\"]};\n"
        "requests that come together are translated together. / is a page to type a sentence into, /health says that\n"
        "the server is well, and /metrics has figures for Prometheus. SIGTERM and Ctrl-C end it: then the requests\n"
        "that have come are still answered.\n\n"
        "Reads a checkpoint of the run. Prints its address. Needs uvicorn: pip install uvicorn",
        "deepnmt serve runs/my\n"
        "deepnmt serve runs/my --checkpoint best --host 0.0.0.0 --port 8080 translate.beam=1",
    )
    add = parser.add_argument
    add("--checkpoint", action="append", metavar="WHICH", help=_ENSEMBLE)
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="the address to listen at (default %(default)s, which only this machine reaches; 0.0.0.0: every one)")
    add("--port", type=int, default=8000, metavar="N", help="its port; 0: any that is free (default %(default)s)")
    add("--batch", type=int, default=64, metavar="N", help="sentences translated together (default %(default)s)")
    add("--queue", type=int, default=1000, metavar="N",
        help="sentences that may wait; more are refused with 503 (default %(default)s)")
    add("--sentences", type=int, default=100, metavar="N", help="sentences of a request (default %(default)s)")
    add("--bytes", type=int, default=256 * 1024, metavar="N", help="bytes of a request (default %(default)s)")
    add("--drain", type=int, default=30, metavar="N",
        help="seconds in which requests are still answered after a signal (default %(default)s)")
    args, recipe = parse(parser, words)
    settable(args, ["run", "model", "translate", "seed", "parallel.threads", "parallel.device"],
             "a trained model translates as it is")
    positive(args, "batch", "queue", "sentences", "bytes", "drain")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port is {args.port}, must be from 0 to 65535")
    checkpoints = _checkpoints(args.checkpoint, recipe)
    from deepnmt.processes.launch import rank_from_environment
    from deepnmt.serve.server import serve

    if (count := rank_from_environment()[1]) > 1:
        raise UserError(f"serve was started on {count} processes, but one model answers at one port; start it alone")
    with _processes(recipe) as ranks:
        serve(recipe, ranks, checkpoints=checkpoints, expected=expected_model(args, recipe, checkpoints),
              host=args.host, port=args.port, batch=args.batch, queue=args.queue, sentences=args.sentences,
              body=args.bytes, drain=args.drain)


def _diagnose(words: list[str]) -> None:
    """Predict whether a deep model will train, and examine its layers."""
    parser = recipe_parser(
        "diagnose",
        "Examines a model on one batch: how layers depend on each other, how far an update moves the output,\n"
        "gradients, ranges, and how similar layers are. For a recipe it trains for 40 updates and predicts what the\n"
        "model will do after more: stuck or diverging, the target side only, or translating. For a run that has\n"
        "checkpoints it examines the newest, and measures which of the three it does.\n\n"
        "Reads the prepared data. Prints a table and writes JSON, pictures and a page into RUN/diagnosis, or\n"
        "RUN/diagnosis-CHECKPOINT.",
        "deepnmt diagnose my.yaml\n"
        "deepnmt diagnose my.yaml model.encoder.block=post_ln\n"
        "deepnmt diagnose runs/my --checkpoint best",
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", metavar="WHICH",
                       help="best (by validation), newest, averaged, the folder of a checkpoint, or a run, whose "
                       "newest is taken")
    which.add_argument("--fresh", action="store_true", help="examine the initial weights of a run")
    add("--output", type=Path, metavar="FOLDER",
        help="the folder of the results (default: RUN/diagnosis or RUN/diagnosis-CHECKPOINT)")
    add("--tokens", type=int, default=256, metavar="N", help="target tokens of the batch (default 256)")
    add("--updates", type=int, metavar="N",
        help="predict what the model does after N updates (default: train.updates)")
    add("--minutes", type=float, default=10.0, metavar="N",
        help="where failure is predicted, begin no other recipe that would end after N minutes (default 10)")
    add("--processes", type=int, default=1, metavar="N",
        help="processes that training will run on, which the size of an update depends on (default 1)")
    add("--rule", type=Path, metavar="FILE", help="a verdict rule to use in place of deepnmt's own")
    args, recipe = parse(parser, words)
    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}, must be 1 or more, for example 256")
    positive(args, "processes", "minutes")
    if args.updates is not None and not 1 <= args.updates <= recipe.train.updates:
        raise UserError(f"--updates is {args.updates}, must be from 1 to train.updates ({recipe.train.updates})")
    if args.fresh and not Path(args.recipe).is_dir():
        raise UserError(f"--fresh has no effect here because {args.recipe} is a recipe, whose model is always new; "
                        "remove it, or give the folder of a run")
    profiled(args, recipe, ["tokens"])  # Admin as an alternative, and at other depths, is profiled in any recipe
    from deepnmt.doctor.diagnose import AT_CHECKPOINT, default_checkpoint, diagnose
    from deepnmt.processes.launch import rank_from_environment

    if (count := rank_from_environment()[1]) > 1:
        raise UserError(f"diagnose was started on {count} processes, but it looks at one model by itself; start it "
                        "alone, and say with --processes how many training will run on")
    with _processes(recipe) as ranks:
        is_run = Path(args.recipe).is_dir() and not args.fresh
        checkpoint = default_checkpoint(recipe, _checkpoint(args.checkpoint, recipe), is_run)
        if checkpoint is not None:
            settable(args, AT_CHECKPOINT, f"{checkpoint} is as it was trained; --fresh looks at a new model")
            if args.rule is not None:
                raise UserError(f"--rule {args.rule} has no effect here because a rule judges models before training "
                                f"and {checkpoint} is a checkpoint; remove it, or look at a new model with --fresh")
            for name in ("processes", "updates", "minutes"):
                if (value := getattr(args, name)) != parser.get_default(name):
                    raise UserError(f"--{name} {value} has no effect here because only a verdict asks for it, and "
                                    f"{checkpoint} is a checkpoint; remove it, or look at a new model with --fresh")
        print(diagnose(recipe, ranks.device, checkpoint=checkpoint, output=args.output, tokens=args.tokens,
                       rule=args.rule, processes=args.processes, updates=args.updates, seconds=60 * args.minutes))


def _consolidate(words: list[str]) -> None:
    """Put a checkpoint that several processes wrote in shards into one file."""
    parser = recipe_parser(
        "consolidate",
        "Writes a checkpoint in shards as one whose weights and moments are in one file each, as other programs read\n"
        "them. deepnmt itself needs it nowhere: every command reads either form.\n\n"
        "Reads a checkpoint of the run. Writes RUN/consolidated, a checkpoint folder, or the one that --output names.",
        "deepnmt consolidate runs/my\n"
        "deepnmt consolidate runs/my --checkpoint best --output runs/my/one-file",
    )
    parser.add_argument("--checkpoint", default="newest", metavar="WHICH",
                        help="best (by validation), newest, or the folder of a checkpoint (default newest)")
    parser.add_argument("--output", metavar="FOLDER", help="the folder to write, or the checkpoint itself, which "
                        "it then replaces (default: RUN/consolidated)")
    args, recipe = parse(parser, words)
    settable(args, ["run"], "a checkpoint is rewritten as it is")
    from deepnmt.checkpoint.consolidate import consolidate

    source, target = Path(_checkpoint(args.checkpoint, recipe) or recipe.run), Path(recipe.run) / "consolidated"
    print(consolidate(source, Path(args.output) if args.output else target))


def _fold(words: list[str]) -> None:
    """Write a trained Admin or DeepNorm model as plain Post-LN."""
    parser = recipe_parser(
        "fold",
        "Writes a trained model as a plain Post-LN model with the same logits: the factors of Admin and DeepNorm are\n"
        "multiplied into the norms and matrices beside them. Stacks of other blocks stay as they are.\n\n"
        "Reads a checkpoint of the run. Writes RUN/folded, a checkpoint folder, or the one that --output names.",
        "deepnmt fold runs/my\n"
        "deepnmt fold runs/my --checkpoint best --output runs/my/folded-best",
    )
    parser.add_argument("--checkpoint", metavar="WHICH", help=_CHECKPOINT)
    parser.add_argument("--output", metavar="FOLDER", help="the folder of the folded model (default: RUN/folded)")
    args, recipe = parse(parser, words)
    settable(args, ["run"], "a trained model is folded as it is")
    from deepnmt.export.post_ln import fold_run

    print(fold_run(recipe, _checkpoint(args.checkpoint, recipe), args.output))


def _import(words: list[str]) -> None:
    """Import a model of Marian (OPUS-MT) or fairseq into a run."""
    parser = plain_parser(
        "import",
        "Makes a run of a model that Marian or fairseq has trained, to translate with, to export, or to fine-tune: a\n"
        "recipe with train.init_from and vocab.model naming the run begins with its weights and its vocabulary.\n\n"
        "Reads a folder: a Marian model in Hugging Face's layout (config.json, the weights, source.spm, target.spm,\n"
        "vocab.json), or a fairseq checkpoint (.pt) with its dictionaries dict.*.txt and sentencepiece.bpe.model. No\n"
        "pickle is executed. Writes RUN/averaged, a checkpoint, and RUN/recipe.yaml.",
        "deepnmt import opus-mt-de-en runs/opus --langs de en",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the model")
    parser.add_argument("run", type=Path, metavar="RUN", help="the new run folder")
    parser.add_argument("--langs", nargs=2, metavar=("SRC", "TRG"),
                        help="the languages, where the folder does not say (default: as it says)")
    args = parser.parse_args(words)
    from deepnmt.export.imports import import_run

    print(import_run(args.folder, args.run, args.langs))


def _export(words: list[str]) -> None:
    """Write a trained model for CTranslate2, Hugging Face or ONNX, and prove it."""
    parser = recipe_parser(
        "export",
        "Writes a trained model in the form of another program, and compares the two on a text: the log-probability\n"
        "of every token of the references, greedy translations, and BLEU of a beam search. The folder is kept only\n"
        "if they are the same. Its README.md shows how to translate with it where deepnmt is not installed.\n\n"
        "  ctranslate2   CTranslate2, the fast engine for CPUs and GPUs; translate.backend=ctranslate2 uses it, too\n"
        "  huggingface   transformers: MarianMTModel (Post-LN) or PegasusForConditionalGeneration (Pre-LN)\n"
        "  onnx          two ONNX graphs, of any block\n"
        "  post_ln       a checkpoint of plain Post-LN, as deepnmt fold writes it\n\n"
        "Reads a checkpoint of the run and its validation text. Writes RUN/ctranslate2 and so on, or the folder that\n"
        "--output names.",
        "deepnmt export runs/my --to ctranslate2\n"
        "deepnmt export runs/my --to ctranslate2 --precision int8 --output runs/my/int8\n"
        "deepnmt export runs/my --to huggingface --checkpoint best --licence cc-by-4.0",
    )
    add = parser.add_argument
    add("--to", required=True, choices=["ctranslate2", "huggingface", "onnx", "post_ln"],
        help="the program, or the form")
    add("--checkpoint", metavar="WHICH", help=_CHECKPOINT)
    add("--output", metavar="FOLDER", help="the folder to write (default: RUN/ctranslate2 and so on; RUN/folded)")
    add("--precision", default="fp32", choices=["fp32", "bf16", "int16", "int8"],
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
    checkpoint = _checkpoint(args.checkpoint, recipe)
    if args.to == "post_ln":
        for name in ("precision", "text", "lines", "licence"):
            if getattr(args, name) != parser.get_default(name):
                raise UserError(f"--{name} has no effect with --to post_ln, which compares logits in float64 and "
                                "writes a checkpoint; remove it")
        from deepnmt.export.post_ln import fold_run

        print(fold_run(recipe, checkpoint, args.output))
        return
    from deepnmt.export.job import export_run

    with _processes(recipe):
        print(export_run(recipe, args.to, checkpoint, args.output, precision=args.precision, text=args.text,
                         lines=args.lines, licence=args.licence))


def _demo(words: list[str]) -> int:
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
    from deepnmt.demo.run import run_demo

    return run_demo(recipe, args.pairs)


def _check_cluster(words: list[str]) -> int:
    """Check that the machines of a run fit together, and how fast they talk."""
    parser = recipe_parser(
        "check-cluster",
        "Compares the machines of a run before it begins: versions of deepnmt's code, PyTorch, DeepSpeed and the\n"
        "GPUs' driver, GPUs, clocks, the prepared data, and whether all see and write the same run folder. It times\n"
        "the network. Start it as you start training.\n\n"
        "Reads the prepared data's manifest. Prints a table and every difference; writes and removes small files in\n"
        "the run folder.\n\n"
        "exit codes:\n"
        "    0  the machines fit together\n"
        "    2  a difference or a fault was found, or a mistake in the recipe",
        "deepspeed --quiet --num_accelerators 2 --module deepnmt check-cluster my.yaml\n"
        "torchrun --nproc_per_node 2 -m deepnmt check-cluster my.yaml",
    )
    parser.add_argument("--mb", type=int, default=64, metavar="N",
                        help="megabytes of the all-reduce that is timed (default 64)")
    args, recipe = parse(parser, words)
    positive(args, "mb")
    from deepnmt.processes.check import check_cluster

    with _processes(recipe, differ=True) as ranks:
        text, faults = check_cluster(recipe, ranks, args.mb)
        if ranks.first:
            print(text)
            print("\n".join(f"difference: {fault}" for fault in faults) or "the machines fit together")
    return 2 if faults else 0


_GROUPS: dict[str, dict[str, Command]] = {
    "Recipes to begin with": {"recipes": _recipes, "copy": _copy, "new": _new},
    "From text to a score, in the order of use": {
        "run": _run,
        "get": _get, "split": _split, "prepare": _prepare, "profile": _profile, "train": _train, "status": _status,
        "average": _average,
        "translate": _translate, "score": _score, "evaluate": _evaluate, "report": _report, "serve": _serve,
    },
    "Examine a model, or convert it": {"diagnose": _diagnose, "export": _export, "import": _import, "fold": _fold,
                                      "consolidate": _consolidate},
    "Try deepnmt, or a cluster": {"demo": _demo, "check-cluster": _check_cluster},
}
# Commands of earlier versions, and what has taken their place.
MOVED = {"gpu-report": "python -m studies gpu-report, in a checkout of the repository"}
COMMANDS: dict[str, Command] = {name: run for group in _GROUPS.values() for name, run in group.items()}
OVERVIEW = overview_of("deepnmt", _GROUPS, """\
Exit codes: 0 done; 2 a mistake, which a message explains; 75 training was stopped and has saved; 130 Ctrl-C.
Versions: deepnmt --version. In Python: import deepnmt; help(deepnmt).
Documentation: README.md and docs/ of the repository. Studies, in a checkout: python -m studies --help.""")


def entry() -> None:
    """The console script."""
    code = main()
    gc.collect()
    gc.freeze()  # else Python would take all modules apart: half a second
    sys.exit(code)
