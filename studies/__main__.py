"""`python -m studies NAME ...`: what proves deepnmt's claims, each study a command. No torch until one runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from deepnmt import arguments
from deepnmt.arguments import batch_options, given, parse, positive
from deepnmt.cli import Command, run_command
from deepnmt.config import Init
from deepnmt.errors import UserError

PROGRAM = "python -m studies"
plain_parser = partial(arguments.plain_parser, program=PROGRAM)
recipe_parser = partial(arguments.recipe_parser, program=PROGRAM)


def whole_numbers(parser: argparse.ArgumentParser, *options: tuple[str, str, int | list[int] | None, str]) -> None:
    """Options with a metavar, a default and a help text, of several numbers where the default is not one."""
    for name, metavar, default, text in options:
        parser.add_argument(name, type=int, metavar=metavar, default=default, help=text,
                            nargs=None if isinstance(default, int) else "+")


def use_threads(count: int) -> None:
    """Torch computes with so many from here on."""
    import torch

    torch.set_num_threads(count)


def compare(words: list[str]) -> None:
    """Draw the learning curves of several runs in one picture."""
    parser = plain_parser(
        "compare", "Draws the training losses of several runs and prints them as a table.",
        "python -m studies compare runs/post_ln runs/admin --output runs/blocks.png",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--output", type=Path, default="runs/comparison.png", metavar="FILE", help="the picture")
    parser.add_argument("--title", default="Training loss", help="over the picture")
    args = parser.parse_args(words)
    from studies.compare import compare_runs

    print(compare_runs(args.runs, args.output, args.title))


def verdict_grid(words: list[str]) -> None:
    """Train many small models, and fit the doctor's verdict on them."""
    parser = plain_parser(
        "verdict-grid",
        "run: trains small models over blocks, depths, rates and warm-up and appends a line of JSON for\n"
        "each to RUNS; said again, it goes on with what is missing. measure: measures the models of old lines again\n"
        "that lack a feature, without training them. fit: fits the verdict rule on such lines, judges it on runs held\n"
        "out, and writes the rule, a table and a picture beside them. judge: tells how right a finished rule is on\n"
        "runs that it was not fitted on.",
        "python -m studies verdict-grid run runs/verdict/runs.jsonl --blocks post_ln pre_ln admin\n"
        "  python -m studies verdict-grid fit runs/verdict/runs.jsonl\n"
        "  python -m studies verdict-grid judge runs/verdict/fresh.jsonl --rule runs/verdict/verdict.json",
    )
    parser.add_argument("action", choices=["run", "measure", "fit", "judge"])
    parser.add_argument("runs", type=Path, metavar="RUNS", help="the file of runs, a line of JSON each")
    parser.add_argument("--blocks", nargs="+", metavar="BLOCK", help="words, or ENCODER/DECODER (default: all blocks)")
    parser.add_argument("--rates", nargs="+", type=float, metavar="R", help="peak rates (default 1e-3 3e-3 1e-2 3e-2)")
    whole_numbers(parser, ("--depths", "N", None, "layers of each stack (default 6 12 18 36)"),
                  ("--sentences", "N", [8], "of a batch (default 8)"), ("--seeds", "N", [1], "default 1"),
                  ("--threads", "N", 1, "default 1"))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16", "fp16"], default=["fp32"],
                        help="default fp32")
    parser.add_argument("--inits", nargs="+", choices=get_args(Init), default=["auto"], help="default auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no run after so many")
    parser.add_argument("--mark", choices=["source", "context"], default="source",
                        help="fit: what counts as learned: reads the source (default), or at least its own output")
    parser.add_argument("--ship", action="store_true", help="fit: make the rule the one that comes with deepnmt")
    parser.add_argument("--rule", type=Path, metavar="FILE", help="judge: a rule other than deepnmt's own")
    args = parser.parse_args(words)
    actions = {"mark": "fit", "ship": "fit", "rule": "judge"}  # of an option; "run" of all others
    for name, value in vars(args).items():
        action = actions.get(name, "run")
        if name not in ("action", "runs") and action != args.action and value != parser.get_default(name):
            raise UserError(f"--{name} is of verdict-grid {action} and has no say in {args.action}; leave it out")
    positive(args, "threads")
    for name in ("depths", "sentences", "rates"):
        for value in getattr(args, name) or []:
            if not 0 < value < float("inf"):
                raise UserError(f"--{name} has {value}, but all must be above 0 and finite")
    if min(args.seeds) < 0:
        raise UserError(f"--seeds has {min(args.seeds)}, but all must be 0 or more")
    from studies.verdict_grid import Settings, fit_grid, grid, judge_runs, measure_anew, run_grid

    if args.action == "fit":
        print(fit_grid(args.runs, args.ship, args.mark))
    elif args.action == "judge":
        print(judge_runs(args.runs, args.rule))
    elif args.action == "measure":
        print(f"{measure_anew(args.runs)} runs measured again")
    else:
        use_threads(args.threads)
        points = grid(args.blocks, args.depths, args.rates, args.sentences, args.seeds, args.precisions, args.inits)
        left = run_grid(points, Settings(), args.runs, args.seconds)
        print(f"{left} runs left" if left else "all runs done")


def reproduce(words: list[str]) -> None:
    """Repeat one of the papers' analyses in small."""
    parser = plain_parser(
        "reproduce",
        "corollaries: output change under noise, 1 to 100 layers (Admin, corollaries 1 and 2).\n"
        "vanishing: gradients of every layer at 18L-18L (Admin, figure 3; B2T, figures 3 and 4).\n"
        "last_ffn: the last FFN's gradient against depth (Pre-LN paper, figure 3).\nWrites a JSON file and a picture.",
        "python -m studies reproduce corollaries --output runs/reproduce",
    )
    parser.add_argument("name", choices=["corollaries", "vanishing", "last_ffn"])
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), metavar="FOLDER")
    whole_numbers(parser, ("--width", "D", 64, "a multiple of 4 (default 64)"),
                  ("--sentences", "N", 16, "of 20 tokens (default 16)"), ("--trials", "N", 5, "seeds (default 5)"),
                  ("--deepest", "N", 100, "layers (default 100)"), ("--threads", "N", 1, "default 1"))
    args = parser.parse_args(words)
    positive(args, "width", "sentences", "trials", "deepest", "threads")
    from studies.papers import Small
    from studies.papers import reproduce as run

    use_threads(args.threads)
    print(run(args.name, args.output, Small(args.width, args.sentences, args.trials, args.deepest)))


def compare_blocks(words: list[str]) -> None:
    """Train every residual system with one recipe and compare them."""
    parser = recipe_parser(
        "compare-blocks",
        "Trains a recipe with one block after the other, at several depths, each from scratch, and once without\n"
        "sources. Writes OUTPUT/runs.jsonl (a line a run; said again, it goes on with what is missing), a table of\n"
        "what each learned, blocks.md, and a picture, blocks.png. The recipe's data must be prepared.",
        "python -m studies compare-blocks recipes/demo/admin_18l-18l.yaml parallel.ds_config=null --depths 6 12"
        " --processes 2",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/blocks"), metavar="FOLDER",
                        help="default: %(default)s")
    parser.add_argument("--blocks", nargs="+", metavar="BLOCK",
                        help="words, or ENCODER/DECODER (default: all, post_ln/pre_ln and pre_ln/post_ln)")
    parser.add_argument("--inits", nargs="+", choices=get_args(Init), default=["auto"], metavar="INIT",
                        help="initialisations, auto xavier xavier_separate depth_scaled; what comes to the same for a"
                        " block is run once (default auto)")
    whole_numbers(parser, ("--depths", "N", [18, 36], "layers of each stack (default 18 36)"),
                  ("--warmups", "N", None, "updates of warm-up (default: the recipe's)"),
                  ("--processes", "N", 1, "runs at a time (default 1)"))
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no run after so many")
    args, recipe = parse(parser, words)
    positive(args, "processes")
    options = {"encoder.block": "--blocks", "encoder.layers": "--depths",
               "decoder.block": "--blocks", "decoder.layers": "--depths"}
    options = {f"model.{name}": option for name, option in options.items()}
    for name, option in {**options, **({"schedule.warmup": "--warmups"} if args.warmups else {})}.items():
        if name in given(args):
            raise UserError(f"{name} has no say here, since a study sets it for every run; leave it out and say "
                            f"{option}")
    from studies.blocks import list_systems, study

    systems = list_systems(recipe, args.blocks, args.depths, args.warmups, args.inits)
    print(study(recipe, args.output, systems, args.processes, args.seconds))


def benchmark(words: list[str]) -> None:
    """Time training and translation against a plain loop."""
    parser = recipe_parser(
        "benchmark",
        "Target tokens/s of the training loop against a plain loop over torch.nn.Transformer of the same shape on the\n"
        "same batches; sentences/s of translation with and without the cache.",
        "python -m studies benchmark recipes/multi30k/de-en_4l-4l.yaml batch.tokens=2048"
        " --translate runs/multi30k_de-en",
    )
    whole_numbers(parser, ("--updates", "N", 20, "timed updates a round (default 20)"),
                  ("--rounds", "N", 3, "rounds (default 3)"))
    parser.add_argument("--translate", metavar="RUN", help="a trained run whose first test set is translated")
    parser.add_argument("--output", type=Path, default="runs/benchmark.json", metavar="FILE", help="JSON file")
    args, recipe = parse(parser, words)
    positive(args, "updates", "rounds")
    from studies.benchmarks.training import benchmark

    benchmark(recipe, args.updates, args.rounds, Path(args.translate) if args.translate else None, args.output)


def layouts(words: list[str]) -> None:
    """Take the same updates in several layouts and compare losses, memory and time."""
    parser = recipe_parser(
        "layouts",
        "Takes the same updates, on random batches of the recipe's shape, in each layout. A layout is local,\n"
        "CONFIG:PROCESSES or CONFIG:PROCESSES/STAGES, CONFIG a file of ds_configs/ and a precision, such as\n"
        "zero3_bf16; pipeline_ before it makes every process a stage.",
        "python -m studies layouts recipes/demo/admin_18l-18l.yaml --layouts local zero3_fp32:2"
        " pipeline_zero1_fp32:2",
    )
    parser.add_argument("--layouts", nargs="+", required=True, metavar="LAYOUT")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file")
    whole_numbers(parser, ("--updates", "N", 3, "default 3"),
                  ("--micro-batches", "M", 4, "of an update, over all processes (default 4)"))
    batch_options(parser)
    args, recipe = parse(parser, words)
    positive(args, "updates", "micro_batches", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import compare_layouts, parse_layout

    compare_layouts(recipe, [parse_layout(text) for text in args.layouts], args.updates, args.micro_batches,
                    args.tokens, args.vocab, args.threads, args.output)


def pipeline_idle(words: list[str]) -> None:
    """Measure a pipeline's idle time as micro-batches grow."""
    parser = recipe_parser(
        "pipeline-idle",
        "Runs a pipeline, one process a stage, with more and more micro-batches an update, and compares the time its\n"
        "stages wait with (stages - 1) / (micro-batches + stages - 1). Writes idle.json and idle.png.",
        "python -m studies pipeline-idle recipes/demo/admin_18l-18l.yaml --stages 2 --counts 1 2 4 8 16",
    )
    parser.add_argument("--config", default="pipeline_zero1_fp32", metavar="NAME",
                        help="file of ds_configs/ and precision (default: %(default)s)")
    whole_numbers(parser, ("--stages", "P", 2, "default 2"),
                  ("--counts", "M", [1, 2, 4, 8, 16], "micro-batches an update (default 1 2 4 8 16)"))
    parser.add_argument("--output", type=Path, default=Path("runs/idle"), metavar="FOLDER",
                        help="of idle.json and idle.png (default %(default)s)")
    batch_options(parser)
    args, recipe = parse(parser, words)
    positive(args, "stages", "counts", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import measure_idle

    measure_idle(recipe, args.config, args.stages, args.counts, args.tokens, args.vocab, args.threads, args.output)


STUDIES: dict[str, Command] = {
    "compare": compare,
    "verdict-grid": verdict_grid,
    "reproduce": reproduce,
    "compare-blocks": compare_blocks,
    "benchmark": benchmark,
    "layouts": layouts,
    "pipeline-idle": pipeline_idle,
}


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """`python -m studies NAME ...`; see `run_command`."""
    return run_command(PROGRAM, STUDIES, command, arguments)


if __name__ == "__main__":
    sys.exit(main())
