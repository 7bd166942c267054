"""`python -m studies NAME ...`: the measurements behind the documentation. PyTorch is imported only when one runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepnmt import arguments
from deepnmt.arguments import given, parse, positive
from deepnmt.cli import Command, end_process, overview_of, run_command
from deepnmt.config.choices import INITS
from deepnmt.errors import UserError
from deepnmt.files import read_numbered_log

PROGRAM = "python -m studies"
plain_parser = partial(arguments.plain_parser, program=PROGRAM)
recipe_parser = partial(arguments.recipe_parser, program=PROGRAM)


Option = tuple[str, str, type, object, str]  # name, metavar, type, default (a list: several values), help
BLOCKS: Option = ("--blocks", "BLOCK", str, [], "blocks, or ENCODER/DECODER pairs (default: all blocks)")
SECONDS: Option = ("--seconds", "N", float, float("inf"), "start no run after N seconds")
THREADS: Option = ("--threads", "N", int, 1, "threads of each process (default 1)")
RANDOM_BATCHES: tuple[Option, ...] = (("--tokens", "N", int, 512, "tokens per micro-batch and side (default 512)"),
                                      ("--vocab", "V", int, 8000, "vocabulary size (default 8000)"), THREADS)


def add_options(parser: argparse.ArgumentParser, *options: Option) -> None:
    """Adds options to a parser."""
    for name, metavar, kind, default, text in options:
        parser.add_argument(name, type=kind, metavar=metavar, default=default, help=text,
                            nargs="+" if isinstance(default, list) else None)


def use_threads(count: int) -> None:
    """Sets the number of PyTorch's threads."""
    import torch

    torch.set_num_threads(count)


def compare(words: list[str]) -> None:
    """Plot the learning curves of several runs in one picture."""
    parser = plain_parser(
        "compare",
        "Plots the losses of several runs and prints them as a table. With --source-use: how they use their source.",
        "python -m studies compare runs/post_ln runs/admin --output runs/blocks.png",
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="run folders")
    add_options(parser, ("--output", "FILE", Path, "runs/comparison.png", "the picture"),
                ("--title", "TITLE", str, "Training loss", "title of the picture"))
    parser.add_argument("--valid", action="store_true",
                        help="plain losses of the validation text, not the label-smoothed ones of training")
    parser.add_argument("--source-use", action="store_true",
                        help="validation loss, the source's gain and the encoder's common vector")
    args = parser.parse_args(words)
    from studies.compare import compare_runs, compare_source_use

    pairs = [(name, Path(folder)) for name, _, folder in (word.rpartition("=") for word in args.runs)]
    short = len({folder.name for _, folder in pairs}) == len(pairs)  # whether that tells the runs apart
    named = {}
    for name, folder in pairs:
        named[name or (folder.name if short else str(folder))] = folder
    if args.source_use:
        print(compare_source_use(named, args.output, args.title))
    else:
        print(compare_runs(named, args.output, args.title, args.valid))


def admin_profile(words: list[str]) -> None:
    """Plot measured profiles of Admin beside the published one."""
    parser = plain_parser(
        "admin-profile",
        "Plots profiles that deepnmt profile wrote. Those of width 512 are compared with all published values of ω\n"
        "at 100L-100L; others are shown with the output change that their ω make.",
        "python -m studies admin-profile runs/in_place/admin_profile.json runs/separate/admin_profile.json",
    )
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="files admin_profile.json")
    add_options(parser, ("--output", "FILE", Path, "runs/admin_profile.png", "the picture"))
    args = parser.parse_args(words)
    from studies.admin_profile import compare_profiles

    print(compare_profiles(args.profiles, args.output))


def verdict_runs(words: list[str]) -> None:
    """Train many small models on real text, and fit the doctor's verdict on them."""
    parser = plain_parser(
        "verdict-runs",
        "run    trains small models drawn at random, and appends a line of JSON for each to RUNS; run it again to\n"
        "       train the missing ones\n"
        "fit    fits the verdict's rule on these runs, and tests it with texts, depths and blocks held out\n"
        "judge  reports how right a finished rule is on runs it was not fitted on, and draws a picture beside RUNS\n"
        "learn  says how right a rule becomes as it learns from more of these runs\n"
        "toy    writes the toy task as a text into the folder RUNS\n"
        "again  trains every run of --of with another seed, and says how many end as before\n"
        "propose  draws runs of --of that failed, trains what the doctor rates highest instead, and appends a\n"
        "       line of JSON for each to RUNS\n\n"
        "Texts are read from the folder that DEEPNMT_CORPORA names; studies/results/verdict.md says how they are made.",
        "python -m studies verdict-runs run runs/verdict/runs.jsonl --count 80\n"
        "  python -m studies verdict-runs fit runs/verdict/runs.jsonl\n"
        "  python -m studies verdict-runs judge runs/verdict/fresh.jsonl --rule runs/verdict/verdict.json",
    )
    parser.add_argument("action", choices=["run", "fit", "judge", "learn", "toy", "again", "propose"])
    parser.add_argument("runs", type=Path, metavar="RUNS", help="file of runs, one line of JSON each")
    add_options(parser, BLOCKS, ("--depths", "N", int, [], "layers of a stack, drawn from these"),
                ("--texts", "TEXT", str, [], "texts (default: multi30k tatoeba europarl toy)"),
                ("--count", "N", int, None, "number of runs (default 80; propose: 10)"),
                ("--of", "FILE", Path, None, "again, propose: the runs to train again, or to draw from"),
                ("--seed", "N", int, 1, "of the draw (default 1)"),
                ("--share", "N", int, [0, 1], "K N: train the K-th of every N runs, from 0 (default 0 1)"),
                ("--data", "FOLDER", Path, Path("data/verdict"), "prepared texts (default: %(default)s)"),
                ("--rule", "FILE", Path, None, "judge: a rule other than deepnmt's own"))
    parser.add_argument("--ship", action="store_true",
                        help="fit: replace deepnmt's own rule; judge: note in it how right it was")
    parser.add_argument("--kind", choices=["short", "long", "longest", "first", "first_8000"], default="short",
                        help="run: short ones (the default); long or longest ones, of which many have a slower\n"
                             "encoder; or what `deepnmt new` might write first, also with\n8,000 pieces")
    args = parser.parse_args(words)
    both = ("run", "propose")
    actions = {"ship": ("fit", "judge"), "rule": ("judge",), "of": ("again", "propose"), "count": both, "seed": both,
               "data": (*both, "again")}
    for name, value in vars(args).items():
        used = actions.get(name, ("run",))
        if name not in ("action", "runs") and args.action not in used and value != parser.get_default(name):
            raise UserError(f"--{name} has no effect here because it belongs to verdict-runs {' or '.join(used)}; "
                            "remove it")
    if args.action in ("again", "propose") and args.of is None:
        raise UserError(f"verdict-runs {args.action} needs other runs; give their file with --of, for example "
                        "--of studies/verdict_fresh.jsonl")
    positive(args, "depths")
    if args.count is not None:
        positive(args, "count")
    if len(args.share) != 2 or not 0 <= args.share[0] < args.share[1]:
        raise UserError(f"--share is {' '.join(map(str, args.share))}, must be two numbers, the first from 0 and below "
                        "the second, for example 0 2")
    from studies.verdict_text import (
        CHOICES,
        draw,
        fit_runs,
        judge_runs,
        learn_runs,
        propose_all,
        run_again,
        run_all,
        write_toy,
    )

    if args.action == "fit":
        print(fit_runs(args.runs, args.ship))
    elif args.action == "judge":
        print(judge_runs(args.runs, args.rule, args.ship))
    elif args.action == "learn":
        print(learn_runs(args.runs))
    elif args.action == "toy":
        write_toy(args.runs)
    elif args.action == "again":
        use_threads(1)
        print(run_again(args.of, args.runs, args.data))
    elif args.action == "propose":
        use_threads(1)
        print(propose_all(args.of, args.runs, args.count or 10, args.seed, args.data))
    else:
        use_threads(1)
        asked: dict[str, Any] = {"blocks": tuple(args.blocks), "depths": tuple(args.depths), "texts": tuple(args.texts)}
        choice = replace(CHOICES[args.kind], **{name: values for name, values in asked.items() if values})
        left = run_all(draw(args.count or 80, args.seed, choice, args.data), args.runs, tuple(args.share))
        print(f"{left} runs left" if left else "all runs done")


def reproduce(words: list[str]) -> None:
    """Repeat one of the papers' analyses at a small size."""
    parser = plain_parser(
        "reproduce",
        "corollaries: output change under noise, 1 to 100 layers (Admin, corollaries 1 and 2).\n"
        "vanishing: gradients of every layer at 18L-18L (Admin, figure 3; B2T, figures 3 and 4).\n"
        "places: gradients inside Post-LN decoder layers at 18L-18L (B2T, figures 4 and 7).\n"
        "last_ffn: the last FFN's gradient against depth (Pre-LN paper, figure 3).\n"
        "optimizers: final losses without a warm-up over Adam's beta2 and the rate (Admin, figure 10).\n"
        "warmup: final losses over the length of the warm-up and the rate (Pre-LN paper, figure 2).\n"
        "unbalanced: gradients and changes of attention's matrices over epochs (Admin, figures 5 and 11).\n"
        "similarity: how alike the outputs of trained layers are, 6L-6L (B2T, figure 5).\n"
        "Writes a JSON file and a picture.",
        "python -m studies reproduce corollaries --output runs/reproduce",
    )
    parser.add_argument("name", choices=["corollaries", "vanishing", "places", "last_ffn", "optimizers", "warmup",
                                         "unbalanced", "similarity"])
    add_options(parser, ("--output", "FOLDER", Path, "runs/reproduce", "default: %(default)s"),
                ("--width", "D", int, 64, "model width, a multiple of 4 (default 64)"),
                ("--sentences", "N", int, 16, "sentences of 20 tokens (default 16)"),
                ("--trials", "N", int, 5, "number of seeds (default 5)"),
                ("--deepest", "N", int, 100, "most layers (default 100)"),
                THREADS)
    args = parser.parse_args(words)
    positive(args, "width", "sentences", "trials", "deepest", "threads")
    from studies.papers import Small
    from studies.papers import reproduce as run

    use_threads(args.threads)
    print(run(args.name, args.output, Small(args.width, args.sentences, args.trials, args.deepest)))


def compare_blocks(words: list[str]) -> None:
    """Train every residual block with one recipe and compare them."""
    parser = recipe_parser(
        "compare-blocks",
        "Trains a recipe with each block at several depths, from scratch, and once without sources.\n\n"
        "Reads the prepared data. Writes into OUTPUT: runs.jsonl (a line for each run; run it again to train the\n"
        "missing ones), tables of the outcomes and of what each layer passes on and is worth, blocks.md, and\n"
        "pictures, blocks.png and layers.png (of the deepest models).",
        "python -m studies compare-blocks recipes/demo/admin_18l-18l.yaml parallel.ds_config=null --depths 6 12"
        " --processes 2",
        setting="parallel.ds_config=null",
    )
    parser.add_argument("--inits", nargs="+", choices=list(INITS), default=["auto"], metavar="INIT",
                        help="initialisations: auto xavier xavier_separate depth_scaled published fairseq; a block runs"
                        " once for those that mean the same for it (default auto)")
    add_options(parser, ("--output", "FOLDER", Path, "runs/blocks", "default: %(default)s"),
                (*BLOCKS[:4], "blocks, or ENCODER/DECODER pairs (default: all, post_ln/pre_ln and pre_ln/post_ln)"),
                ("--depths", "N", int, [18, 36], "layers of each stack (default 18 36)"),
                ("--warmups", "N", int, [], "updates of warm-up (default: the recipe's)"),
                ("--seeds", "N", int, [], "seeds; one that is added later is trained alone (default: the recipe's)"),
                ("--rates", "R", float, [], "peak learning rates to search for each block by what the source is\n"
                 "worth, in shorter runs; extended while the best is at an end (default: no search, the recipe's)"),
                ("--search-updates", "N", int, None, "updates of a run of the search (default: a third, or until\n"
                 "optimizer.lr_factors_until has no effect any more)"),
                ("--runs", "FILE", Path, None, "the file of runs (default OUTPUT/runs.jsonl)"),
                ("--processes", "N", int, 1, "simultaneous runs (default 1)"), SECONDS)
    parser.add_argument("--keep-weights", action="store_true", help="keep each run's last weights in OUTPUT/weights")
    args, recipe = parse(parser, words)
    positive(args, "processes")
    options = {f"model.{side}.{name}": option for side in ("encoder", "decoder")
               for name, option in (("block", "--blocks"), ("layers", "--depths"))}
    for name, option in {**options, "schedule.warmup": "--warmups"}.items():
        if name in given(args) and (name in options or args.warmups):
            raise UserError(f"{name} has no effect here because the study sets it for every run; remove it and use "
                            f"{option}")
    if len(set(args.rates)) == 1:
        raise UserError("--rates has one value, so there is nothing to search; give two or more, or set optimizer.lr")
    if args.search_updates is not None:
        positive(args, "search_updates")
        if not args.rates:
            raise UserError("--search-updates has no effect here because no rates are searched; add --rates, or remove "
                            "it")
    from studies.blocks import Plan, study
    from studies.variants import list_variants

    variants = list_variants(recipe, args.blocks, args.depths, args.warmups, args.inits)
    print(study(recipe, args.output, variants, Plan(args.seeds, args.rates, args.search_updates, args.processes,
                                                    args.seconds, args.runs, args.keep_weights)))


def benchmark(words: list[str]) -> None:
    """Time training and translation against a plain PyTorch loop."""
    parser = recipe_parser(
        "benchmark",
        "Target tokens/s of training against a plain PyTorch loop over torch.nn.Transformer of the same shape on the\n"
        "same batches; sentences/s of translation with and without the cache.",
        "python -m studies benchmark recipes/multi30k/de-en_4l-4l.yaml batch.tokens=2048"
        " --translate runs/multi30k_de-en",
        setting="batch.tokens=2048",
    )
    add_options(parser, ("--updates", "N", int, 20, "timed updates per round (default 20)"),
                ("--rounds", "N", int, 3, "default 3"),
                ("--translate", "RUN", Path, None, "also time translating the first test set of this run"),
                ("--output", "FILE", Path, "runs/benchmark.json", "JSON file"))
    args, recipe = parse(parser, words)
    positive(args, "updates", "rounds")
    from studies.benchmarks.training import benchmark

    benchmark(recipe, args.updates, args.rounds, args.translate, args.output)


def searches(words: list[str]) -> None:
    """Time deepnmt's search beside CTranslate2's with the same model."""
    parser = plain_parser(
        "searches",
        "Translates a text by deepnmt's own search, by its backend ctranslate2 and by CTranslate2 itself, in turns,\n"
        "and prints sentences per second of CPU time and BLEU as a table. RUN needs the folder that\n"
        "deepnmt export RUN --to ctranslate2 writes.",
        "python -m studies searches runs/my test.de test.en --lines 200",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("source", type=Path, metavar="SRC", help="the text")
    parser.add_argument("reference", type=Path, metavar="REF", help="its translations")
    add_options(parser, ("--lines", "N", int, 1000, "lines of the text (default 1000)"),
                ("--rounds", "N", int, 3, "default 3"), THREADS)
    args = parser.parse_args(words)
    positive(args, "lines", "rounds", "threads")
    from studies.benchmarks.searches import compare_searches

    use_threads(args.threads)
    print(compare_searches(args.run, args.source, args.reference, args.lines, args.rounds))


def layouts(words: list[str]) -> None:
    """Take the same updates in several layouts and compare losses, memory and time."""
    parser = recipe_parser(
        "layouts",
        "Takes the same updates, on random batches of the recipe's shape, in each layout. A layout is local,\n"
        "CONFIG:PROCESSES or CONFIG:PROCESSES/STAGES. CONFIG is a file of ds_configs/ and a precision, such as\n"
        "zero3_bf16; with pipeline_ before it, every process is a pipeline stage.",
        "python -m studies layouts recipes/demo/admin_18l-18l.yaml --layouts local zero3_fp32:2"
        " pipeline_zero1_fp32:2",
    )
    parser.add_argument("--layouts", nargs="+", required=True, metavar="LAYOUT")
    add_options(parser, ("--output", "FILE", Path, None, "JSON file"), ("--updates", "N", int, 3, "default 3"),
                ("--micro-batches", "M", int, 4, "micro-batches per update, over all processes (default 4)"),
                *RANDOM_BATCHES)
    args, recipe = parse(parser, words)
    positive(args, "updates", "micro_batches", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import compare_layouts, parse_layout

    compare_layouts(recipe, [parse_layout(text) for text in args.layouts], args.updates, args.micro_batches,
                    args.tokens, args.vocab, args.threads, args.output)


def pipeline_idle(words: list[str]) -> None:
    """Measure a pipeline's idle time for growing numbers of micro-batches."""
    parser = recipe_parser(
        "pipeline-idle",
        "Runs a pipeline, one process for each stage, with growing numbers of micro-batches per update, and compares\n"
        "the idle time of its stages with (stages - 1) / (micro-batches + stages - 1). Writes idle.json and idle.png.",
        "python -m studies pipeline-idle recipes/demo/admin_18l-18l.yaml --stages 2 --counts 1 2 4 8 16",
    )
    add_options(parser, ("--config", "NAME", str, "pipeline_zero1_fp32",
                         "file of ds_configs/ and precision (default: %(default)s)"),
                ("--stages", "P", int, 2, "default 2"),
                ("--counts", "M", int, [1, 2, 4, 8, 16], "micro-batches per update (default 1 2 4 8 16)"),
                ("--output", "FOLDER", Path, "runs/idle", "default: %(default)s"),
                *RANDOM_BATCHES)
    args, recipe = parse(parser, words)
    positive(args, "stages", "counts", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import measure_idle

    measure_idle(recipe, args.config, args.stages, args.counts, args.tokens, args.vocab, args.threads, args.output)


def saves(words: list[str]) -> None:
    """Measure how long checkpoints stop training, in several layouts."""
    parser = recipe_parser(
        "saves",
        "Saves checkpoints of a model of the recipe's shape while it makes updates on random batches. Layouts are\n"
        "those of python -m studies layouts.",
        "python -m studies saves recipes/demo/admin_18l-18l.yaml --layouts local zero1_fp32:2 zero3_fp32:2",
    )
    parser.add_argument("--layouts", nargs="+", required=True, metavar="LAYOUT")
    add_options(parser, ("--output", "FILE", Path, None, "JSON file"), ("--saves", "N", int, 3, "default 3"),
                *RANDOM_BATCHES)
    args, recipe = parse(parser, words)
    positive(args, "saves", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import parse_layout
    from studies.benchmarks.saves import measure_saves

    measure_saves(recipe, [parse_layout(text) for text in args.layouts], args.saves, args.tokens, args.vocab,
                  args.threads, args.output)


def long_runs(words: list[str]) -> None:
    """Train the runs of a plan to their end, one after another."""
    parser = plain_parser(
        "long-runs",
        "Trains, averages and scores the runs of a plan, in its order, by the commands that a user would type. Each\n"
        "finished run becomes a line of RUNS. The same command goes on where it was stopped.",
        "python -m studies long-runs studies/deep.yaml",
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="YAML file: recipe, arms and seeds")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of this machine, for all runs")
    add_options(parser, ("--runs", "FILE", Path, None, "the file of runs (default: studies/PLAN_runs.jsonl)"),
                ("--output", "FOLDER", Path, None, "folder of the run folders (default: runs/PLAN)"),
                ("--plot", "FILE", Path, None, "a PNG of validation perplexities, with --report"),
                ("--arms", "ARM[=LABEL]", str, [], "--report these alone, each compared with the first of them"),
                SECONDS)
    parser.add_argument("--report", action="store_true", help="print the table of the runs there are; train none")
    args = parser.parse_args(words)
    from studies.long_runs import read_plan, report, run_plan

    if (args.plot or args.arms) and not args.report:
        raise UserError("--plot and --arms belong to --report; add that, or leave them out")
    name = args.plan.stem  # two plans may have arms of the same name
    runs = args.runs or Path("studies", f"{name}_runs.jsonl")
    if args.report:
        print(report(runs, args.plot, args.arms))
        return
    print(run_plan(read_plan(args.plan), runs, args.output or Path("runs", name), args.settings, args.seconds))


def speech(words: list[str]) -> None:
    """Recognise spoken digits of held-out sentences and of a held-out voice."""
    parser = plain_parser(
        "speech",
        "Lets espeak-ng say digits in nine voices, trains a small model on eight of them, and prints its error rates\n"
        "on sentences that it has not heard and on the ninth voice. The same command goes on where it was stopped.",
        "python -m studies speech --output runs/digits\n"
        "python -m studies speech --output runs/digits train.max_seconds=600",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the recipe to change")
    add_options(parser, ("--output", "FOLDER", Path, "runs/digits", "folder of set and run (default: %(default)s)"))
    args = parser.parse_args(words)
    from studies.speech import run_study

    print(run_study(args.output, args.settings))


def gpu_report(words: list[str]) -> int:
    """Measure speed and training on a GPU in ten minutes."""
    parser = plain_parser(
        "gpu-report",
        "Measures matrix products, updates of a 60L-12L model in fp16 and bf16, and the share of the GPU's peak speed\n"
        "that they reach. Then it trains and scores Tatoeba German-English for eight minutes, or for what is left of\n"
        "the budget. With --part layouts it takes 300 updates of 60L-12L in fp16 instead, under ZeRO-1 and as a\n"
        "pipeline of one stage, and times updates with compiled layers, too. Each call takes less than ten minutes.\n\n"
        "Reads the recipes in recipes/tatoeba, which come with deepnmt, and the pairs that --tsv names. Writes a JSON\n"
        "file and a Markdown page into a new folder.",
        "python -m studies gpu-report --tsv deu-eng.tsv.gz --output runs/gpu_report",
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/gpu_report"), metavar="FOLDER",
        help="a new folder for the results (default %(default)s)")
    add("--tsv", type=Path, metavar="FILE",
        help="Tatoeba's sentence pairs, English first; plain, .gz, .xz, .zst or .bz2")
    add("--recipes", type=Path, default=Path("recipes/tatoeba"), metavar="FOLDER",
        help="the folder of the two recipes (default %(default)s)")
    add("--minutes", type=float, default=8.0, metavar="N",
        help="minutes of training, fewer if the budget ends first (default 8)")
    add("--budget", type=float, default=590.0, metavar="SECONDS", help="seconds for everything (default 590)")
    add("--part", choices=("training", "layouts"), default="training",
        help="what is done with the text (default training)")
    add("--toy", action="store_true",
        help="a trial with tiny models and, without --tsv, the demo's corpus; runs on a CPU too")
    args = parser.parse_args(words)
    from deepnmt.extras.demo.corpus import make_corpus
    from studies.benchmarks import gpu_report as report

    def toy(folder: Path) -> dict[str, int]:
        return dict(make_corpus(folder, pairs=600, valid=20, test=20)["counts"])

    return report.gpu_report(args.output, args.recipes, args.tsv, args.minutes, args.budget, toy if args.toy else None,
                             args.part)


def collapse(words: list[str]) -> None:
    """Find out which settings make the encoder collapse."""
    parser = recipe_parser(
        "collapse",
        "Trains a recipe many times for 300 updates, each time with blocks, depth, rates of encoder, decoder and\n"
        "embeddings, warm-up and other settings drawn at random, and says what each of them does. Each run becomes a\n"
        "line of RUNS; the same command trains the missing ones.",
        "python -m studies collapse recipes/multi30k/compare_18l-18l.yaml",
    )
    add_options(parser, ("--runs", "FILE", Path, None, "default: studies/collapse_runs.jsonl"),
                ("--count", "N", int, 180, "number of runs (default: %(default)s)"),
                ("--first", "N", int, 0, "number of the first of them (default: 0); from 180 on, runs also vary "
                                         "Adam's ε, biases, initial weights and tying; from 252 on they are pairs "
                                         "that differ in the embeddings' initial size alone"), SECONDS,
                ("--plot", "FILE", Path, None, "draw what the source is worth by the encoder's rate and block"))
    args, recipe = parse(parser, words)
    positive(args, "count")
    if args.first < 0:
        raise UserError(f"--first is {args.first}, must be 0 or more")
    from studies.collapse import plot, run_draws

    runs = args.runs or Path("studies/collapse_runs.jsonl")
    print(run_draws(recipe, runs, args.first, args.count, args.seconds))
    if args.plot:
        plot([record for _, record in read_numbered_log(runs)], args.plot)


def transfer(words: list[str]) -> None:
    """See whether the best learning rate stays when a model becomes deeper or wider."""
    parser = recipe_parser(
        "transfer",
        "Trains a recipe with seven rates around its own at widths 64 to 256, depths 4 to 32 and with stacks of\n"
        "unequal depth, with model.tuned_at and without, and says where the best rate is. Each run becomes a line of\n"
        "RUNS; the same command trains the missing ones.",
        "python -m studies transfer my.yaml model.encoder.block=pre_ln model.decoder.block=pre_ln",
        setting="model.encoder.block=pre_ln",
    )
    add_options(parser, ("--runs", "FILE", Path, Path("studies/transfer_runs.jsonl"), "default: %(default)s"),
                ("--seeds", "N", int, 3, "seeds of each run (default: %(default)s)"),
                ("--updates", "N", int, 300, "updates of each run (default: %(default)s)"), SECONDS)
    args, recipe = parse(parser, words)
    positive(args, "seeds", "updates")
    from studies.transfer import run_all

    print(run_all(recipe, args.runs, args.seeds, args.updates, args.seconds))


def mlm(words: list[str]) -> int:
    """Train small masked language models with and without a warm-up, and classifiers from one of them."""
    parser = plain_parser(
        "mlm",
        "Trains masked language models of 12 layers: Pre-LN without a warm-up, Post-LN without and with one. Then six\n"
        "classifiers from a model of 2 layers and six from scratch, which tell sentences from shuffled words. Prints\n"
        "two tables. Some minutes on a core; the same command goes on where it was stopped.",
        "python -m studies mlm --text in.txt --valid valid.txt",
    )
    parser.add_argument("--text", required=True, metavar="FILE", help="sentences, one a line, 3,000 or more")
    parser.add_argument("--valid", required=True, metavar="FILE", help="others, 700 or more")
    add_options(parser, ("--folder", "FOLDER", Path, Path("runs/mlm"), "where the runs are (default runs/mlm)"))
    args = parser.parse_args(words)
    from studies.masked_lm import run_study

    return run_study(args.folder, args.text, args.valid)


def deep_blocks(words: list[str]) -> None:
    """Count and measure what each block costs, and train some updates of a deep model of it."""
    parser = plain_parser(
        "deep-blocks",
        "For each block: parameters, kept memory and time of a layer beside Pre-LN's at width 16, and the losses of\n"
        "the first and the last update of a deep model on the toy task.",
        "python -m studies deep-blocks --layers 100 --updates 20",
    )
    add_options(parser, BLOCKS, ("--layers", "N", int, 100, "layers of each side (default 100)"),
                ("--updates", "N", int, 20, "default 20"), THREADS)
    args = parser.parse_args(words)
    positive(args, "layers", "updates", "threads")
    use_threads(args.threads)
    from deepnmt.config import choices
    from studies.deep_blocks import measure_all

    print(measure_all(args.blocks or list(choices.BLOCKS), args.layers, args.updates))


def rate_ramp(words: list[str]) -> None:
    """Find the highest learning rate that each block bears."""
    parser = recipe_parser(
        "rate-ramp",
        "Trains a recipe with each block from scratch. The learning rate begins at 1e-4 and grows by 1 % in\n"
        "each update until the loss rises. Prints what it was when the loss was lowest. Each run becomes a\n"
        "line of RUNS; the same command trains the missing ones.",
        "python -m studies rate-ramp recipes/multi30k/compare_18l-18l.yaml --depths 6 --blocks pre_ln keel --seeds 1",
    )
    add_options(parser, (*BLOCKS[:4], "blocks, or ENCODER/DECODER pairs (default: twelve)"),
                ("--depths", "N", int, [6, 18], "layers of each stack (default 6 18)"),
                ("--seeds", "N", int, [1, 2, 3], "default 1 2 3"),
                ("--runs", "FILE", Path, "studies/ramp_runs.jsonl", "default: %(default)s"), SECONDS)
    args, recipe = parse(parser, words)
    positive(args, "depths", "seeds")
    from studies import rate_ramp as ramps

    print(ramps.table(ramps.study(recipe, args.blocks or ramps.BLOCKS, args.depths, args.seeds, args.runs,
                                  args.seconds)))


def equal_systems(words: list[str]) -> None:
    """Count how often two equal systems are called different."""
    parser = plain_parser(
        "equal-systems",
        "Makes pairs of equal systems from a text: each sentence is its own reference, and each system drops words of\n"
        "it at random. Prints in how many of the pairs p is below 0.05, which should be 5 %: that of evaluate, and\n"
        "that of SacreBLEU's paired bootstrap.",
        "python -m studies equal-systems data/multi30k/text/train.en --pairs 1000 --sentences 250",
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="a sentence a line, in English")
    add_options(parser, ("--pairs", "N", int, 1000, "default 1000"),
                ("--sentences", "N", int, 250, "of each pair's test set (default 250)"),
                ("--metric", "NAME", str, "bleu", "of deepnmt evaluate (default bleu)"))
    args = parser.parse_args(words)
    positive(args, "pairs", "sentences")
    from studies.equal_systems import count_stars

    print(count_stars(args.text, args.pairs, args.sentences, args.metric))


def lm_depth(words: list[str]) -> None:
    """Compare language models of 6 and 16 layers, and a plain PyTorch loop."""
    parser = plain_parser(
        "lm-depth",
        "Trains language models of 6 and 16 layers by Post-LN, Pre-LN and B2T on a text, and beside them a plain\n"
        "PyTorch loop of nanoGPT's shape on the same tokens. Prints bits a byte of the validation text.\n\n"
        "Appends a line for each run to a file; started again, it makes what is missing.",
        "python -m studies lm-depth train.en.gz valid.en.gz --updates 2000 --seeds 3\n"
        "python -m studies lm-depth train.en.gz valid.en.gz --updates 100 --depths 6 --seconds 60",
    )
    for name, what in (("train", "the training text"), ("valid", "the validation text")):
        parser.add_argument(name, metavar=name.upper(), help=f"{what}, a sentence or paragraph a line")
    add_options(parser, ("--output", "FILE", Path, Path("runs/lm_depth.jsonl"), "default runs/lm_depth.jsonl"),
                ("--updates", "N", int, 2000, "of 2,048 tokens (default 2000)"),
                ("--seeds", "N", int, 3, "default 3"), ("--depths", "N", int, [6, 16], "default 6 16"),
                ("--rate", "R", float, 1e-3, "peak learning rate (default 0.001)"), SECONDS, THREADS,
                ("--plot", "FILE", Path, None, "draw the curves of the first seed"))
    args = parser.parse_args(words)
    positive(args, "updates", "seeds", "depths", "threads")
    use_threads(args.threads)
    from studies.lm_depth import plot, study

    print(study(args.train, args.valid, args.output, args.updates, args.seeds, args.depths, args.rate, args.seconds))
    if args.plot:
        plot(args.output, args.plot)


def decoder_only(words: list[str]) -> None:
    """Compare an encoder-decoder with a decoder alone of equal size."""
    parser = recipe_parser(
        "decoder-only",
        "Trains the encoder-decoder of a recipe of translation, and decoders of as many parameters on its pairs, with\n"
        "a loss on the target and on both sides: equal tokens, equal passes. Prints BLEU, chrF, the validation\n"
        "perplexity of the targets and CPU hours. No pair is filtered out; an empty one is refused.\n\n"
        "Writes recipes, runs and runs.jsonl into OUTPUT; the same command goes on where it was stopped.",
        "python -m studies decoder-only recipes/multi30k/deep_18l-18l.yaml model.encoder.layers=3"
        " model.decoder.layers=3",
        setting="model.encoder.layers=3",
    )
    add_options(parser, ("--output", "FOLDER", Path, Path("runs/decoder_only"), "default: %(default)s"),
                ("--seeds", "N", int, [1, 2], "default 1 2"),
                ("--alone", "KEY=VALUE", str, [], "settings of the decoder-only models, such as optimizer.lr=0.001"),
                SECONDS)
    args, recipe = parse(parser, words)
    from studies.decoder_only import study

    if recipe.task != "translation":
        raise UserError(f"decoder-only needs a recipe of task: translation, but this one has task: {recipe.task}")
    print(study(recipe, args.output, args.seeds, args.alone, args.seconds))


def data_at_scale(words: list[str]) -> None:
    """Measure what training waits for and holds with many pairs in shards."""
    parser = plain_parser(
        "data-at-scale",
        "Makes up prepared data in shards, with real offsets and tokens that take no room, in a folder, and measures\n"
        "in processes without a model: CPU seconds to the first micro-batch, the longest wait of an update, memory.\n"
        "With --padding, the padding of prepared text in windows of several sizes. With --update-tokens, that of\n"
        "updates of a fixed size, by the number of processes. With --cleaning, what each rule of cleaning takes for\n"
        "the first 40,000 pairs of a text with tabs.",
        "python -m studies data-at-scale data/made_up --pairs 100000000\n"
        "python -m studies data-at-scale data/made_up --pairs 1000000000 --only-read\n"
        "python -m studies data-at-scale data/multi30k --padding\n"
        "python -m studies data-at-scale deu-eng.tsv --cleaning",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    add_options(parser, ("--pairs", "N", int, 100_000_000, "default 100 million"),
                ("--shard-pairs", "N", int, 1_000_000, "default 1 million"),
                ("--window-pairs", "N", int, 2_000_000, "default 2 million"),
                ("--tokens", "N", int, 4096, "of a micro-batch, for --padding (default 4096)"),
                ("--update-tokens", "N", int, 0, "of an update of a fixed size; FOLDER has real text in one piece"))
    parser.add_argument("--only-read", action="store_true", help="make only those shards that are read")
    parser.add_argument("--padding", action="store_true", help="measure padding; FOLDER has real text in one piece")
    parser.add_argument("--cleaning", action="store_true", help="measure cleaning; FOLDER is a text with tabs")
    args = parser.parse_args(words)
    positive(args, "pairs", "shard_pairs", "window_pairs")
    from studies.benchmarks.data_at_scale import as_table, cleaning, fixed_updates, made_up, measure, padding

    if args.update_tokens:
        print(fixed_updates(args.folder, args.tokens, args.update_tokens))
        return
    if args.cleaning:
        print(cleaning(args.folder, 40_000))
        return
    if args.padding:
        print(padding(args.folder, args.tokens))
        return
    if not args.folder.exists():
        made_up(args.folder, args.pairs, args.shard_pairs, args.window_pairs, args.only_read)
    print(as_table(measure(args.folder, args.window_pairs)))


def peers(words: list[str]) -> None:
    """Measure preparing a text and starting to train on it, beside fairseq and `datasets`."""
    parser = plain_parser(
        "peers",
        "Prepares a text with deepnmt, and with fairseq and `datasets` if --peer names the Python of an environment\n"
        "that has them: pairs a CPU second, memory and bytes a pair. With --pairs, what takes training to\n"
        "its first micro-batch on made-up texts of so many pairs. What it writes into FOLDER is deleted.",
        "python -m studies peers build/peers --src a.de --trg a.en --peer other/bin/python\n"
        "python -m studies peers build/peers --pairs 1000000 100000000 --peer other/bin/python",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made, and deleted at the end")
    add_options(parser, ("--src", "FILE", Path, None, "plain text, a sentence a line"),
                ("--trg", "FILE", Path, None, "its translation"), ("--workers", "N", int, [1, 2], "default 1 and 2"),
                ("--peer", "PYTHON", Path, None, "the program of the environment with fairseq and datasets"),
                ("--pairs", "N", int, [], "measure the start of training with so many pairs"),
                ("--tokens", "N", int, 4096, "of a micro-batch (default 4096)"))
    args = parser.parse_args(words)
    if args.folder.exists():
        raise UserError(f"{args.folder} exists already; give a folder that does not, for it is deleted at the end")
    from studies.benchmarks.data_at_scale import PIECES
    from studies.benchmarks.peers import prepare_speed, start_speed

    if args.pairs:
        print(start_speed(args.folder, args.pairs, args.peer, args.tokens, PIECES))
    for file in (args.src, args.trg) if not args.pairs or args.src else ():
        if file is None or not file.is_file():
            raise UserError(f"there is no text file {file}; give --src and --trg")
    if args.src:
        print(prepare_speed(args.src, args.trg, args.folder, args.workers, args.peer))


STUDIES: dict[str, Command] = {
    "compare": compare,
    "equal-systems": equal_systems,
    "lm-depth": lm_depth,
    "decoder-only": decoder_only,
    "admin-profile": admin_profile,
    "verdict-runs": verdict_runs,
    "reproduce": reproduce,
    "compare-blocks": compare_blocks,
    "long-runs": long_runs,
    "collapse": collapse,
    "transfer": transfer,
    "mlm": mlm,
    "deep-blocks": deep_blocks,
    "rate-ramp": rate_ramp,
    "benchmark": benchmark,
    "searches": searches,
    "layouts": layouts,
    "pipeline-idle": pipeline_idle,
    "saves": saves,
    "data-at-scale": data_at_scale,
    "peers": peers,
    "speech": speech,
    "gpu-report": gpu_report,
}
OVERVIEW = overview_of(PROGRAM, {"Studies behind the documentation": STUDIES},
                       "Exit codes: 0 done; 2 a mistake, explained in a message; 130 Ctrl-C.")


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """`python -m studies NAME ...`; see `run_command`."""
    return run_command(PROGRAM, STUDIES, OVERVIEW, command, arguments)


if __name__ == "__main__":
    end_process(main())
