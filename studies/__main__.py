"""`python -m studies NAME ...`: what proves deepnmt's claims, each study a command. No torch until one runs."""

from __future__ import annotations

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


def compare(words: list[str]) -> int:
    """Draw the learning curves of several runs in one picture."""
    parser = plain_parser(
        "compare", "Draws the training losses of several runs and prints them as a table.",
        "python -m studies compare runs/post_ln runs/admin --output runs/blocks.png",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", default="runs/comparison.png", metavar="FILE", help="the picture")
    parser.add_argument("--title", default="Training loss", help="over the picture")
    found = parser.parse_args(words)
    from studies.compare import compare_runs

    print(compare_runs([Path(run) for run in found.runs], Path(found.output), found.title))
    return 0


def verdict_grid(words: list[str]) -> int:
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
    parser.add_argument("--depths", nargs="+", type=int, metavar="N", help="layers of each stack (default 6 12 18 36)")
    parser.add_argument("--rates", nargs="+", type=float, metavar="R", help="peak rates (default 1e-3 3e-3 1e-2 3e-2)")
    parser.add_argument("--sentences", nargs="+", type=int, default=[8], metavar="N", help="of a batch (default 8)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="N", help="default 1")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16", "fp16"], default=["fp32"],
                        help="default fp32")
    parser.add_argument("--inits", nargs="+", choices=get_args(Init), default=["auto"], help="default auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no run after so many")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--mark", choices=["source", "context"], default="source",
                        help="fit: what counts as learned: reads the source (default), or at least its own output")
    parser.add_argument("--ship", action="store_true", help="fit: make the rule the one that comes with deepnmt")
    parser.add_argument("--rule", type=Path, metavar="FILE", help="judge: a rule other than deepnmt's own")
    found = parser.parse_args(words)
    of_action = {"run": ("blocks", "depths", "rates", "sentences", "seeds", "precisions", "inits", "seconds",
                         "threads"),
                 "fit": ("mark", "ship"), "judge": ("rule",)}
    for action, names in of_action.items():
        for name in names:
            if action != found.action and vars(found)[name] != parser.get_default(name):
                raise UserError(f"--{name} is of verdict-grid {action} and has no say in {found.action}; leave it out")
    positive(found, "threads")
    for name, values in (("depths", found.depths), ("sentences", found.sentences), ("rates", found.rates)):
        for value in values or []:
            if not 0 < value < float("inf"):
                raise UserError(f"--{name} has {value}, but all must be above 0 and finite")
    if min(found.seeds) < 0:
        raise UserError(f"--seeds has {min(found.seeds)}, but all must be 0 or more")
    from studies.verdict_grid import fit_grid, judge_runs, make_grid, measure_anew

    if found.action == "fit":
        print(fit_grid(found.runs, found.ship, found.mark))
        return 0
    if found.action == "judge":
        print(judge_runs(found.runs, found.rule))
        return 0
    if found.action == "measure":
        print(f"{measure_anew(found.runs)} runs measured again")
        return 0
    left = make_grid(found.runs, found.blocks, found.depths, found.rates, found.sentences, found.seeds,
                     found.precisions, found.inits, found.seconds, found.threads)
    print(f"{left} runs left" if left else "all runs done")
    return 0


def reproduce(words: list[str]) -> int:
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
    parser.add_argument("--width", type=int, default=64, metavar="D", help="a multiple of 4 (default 64)")
    parser.add_argument("--sentences", type=int, default=16, metavar="N", help="of 20 tokens (default 16)")
    parser.add_argument("--trials", type=int, default=5, metavar="N", help="seeds (default 5)")
    parser.add_argument("--deepest", type=int, default=100, metavar="N", help="layers (default 100)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default 1")
    found = parser.parse_args(words)
    positive(found, "width", "sentences", "trials", "deepest", "threads")
    from studies.papers import Small, reproduce_on

    print(reproduce_on(found.name, found.output, Small(found.width, found.sentences, found.trials, found.deepest),
                       found.threads))
    return 0


def compare_blocks(words: list[str]) -> int:
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
    parser.add_argument("--depths", nargs="+", type=int, default=[18, 36], metavar="N",
                        help="layers of each stack (default 18 36)")
    parser.add_argument("--warmups", nargs="+", type=int, metavar="N",
                        help="updates of warm-up (default: the recipe's)")
    parser.add_argument("--inits", nargs="+", choices=get_args(Init), default=["auto"], metavar="INIT",
                        help="initialisations, auto xavier xavier_separate depth_scaled; what comes to the same for a"
                        " block is run once (default auto)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no run after so many")
    found, recipe = parse(parser, words)
    positive(found, "processes")
    _set_by_the_study(given(found), bool(found.warmups))
    from studies.blocks import Systems, study

    wanted = Systems(depths=found.depths, warmups=found.warmups, inits=found.inits)
    if found.blocks:
        wanted = Systems(found.blocks, found.depths, found.warmups, found.inits)
    print(study(recipe, found.output, wanted, found.processes, found.seconds))
    return 0


def _set_by_the_study(names: set[str], warmups: bool) -> None:
    """Raises `UserError` for a setting on the line that every run of a study has a value of its own for."""
    options = {f"model.{side}.{name}": option for side in ("encoder", "decoder")
               for name, option in (("block", "--blocks"), ("layers", "--depths"))}
    if warmups:
        options["schedule.warmup"] = "--warmups"
    for name, option in options.items():
        if name in names:
            raise UserError(f"{name} has no say here, since a study sets it for every run; leave it out and say "
                            f"{option}")


def benchmark(words: list[str]) -> int:
    """Time training and translation against a plain loop."""
    parser = recipe_parser(
        "benchmark",
        "Target tokens/s of the training loop against a plain loop over torch.nn.Transformer of the same shape on the\n"
        "same batches; sentences/s of translation with and without the cache.",
        "python -m studies benchmark recipes/multi30k/de-en_4l-4l.yaml batch.tokens=2048"
        " --translate runs/multi30k_de-en",
    )
    parser.add_argument("--updates", type=int, default=20, metavar="N", help="timed updates a round (default 20)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--translate", metavar="RUN", help="a trained run whose first test set is translated")
    parser.add_argument("--output", default="runs/benchmark.json", metavar="FILE", help="JSON file")
    found, recipe = parse(parser, words)
    from studies.benchmarks.training import benchmark

    run = Path(found.translate) if found.translate else None
    benchmark(recipe, found.updates, found.rounds, run, Path(found.output))
    return 0


def layouts(words: list[str]) -> int:
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
    parser.add_argument("--updates", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file")
    parser.add_argument("--micro-batches", type=int, default=4, metavar="M",
                        help="of an update, over all processes (default 4)")
    batch_options(parser)
    found, recipe = parse(parser, words)
    positive(found, "updates", "micro_batches", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import compare_layouts, parse_layout

    compare_layouts(recipe, [parse_layout(text) for text in found.layouts], found.updates, found.micro_batches,
                    found.tokens, found.vocab, found.threads, found.output)
    return 0


def pipeline_idle(words: list[str]) -> int:
    """Measure a pipeline's idle time as micro-batches grow."""
    parser = recipe_parser(
        "pipeline-idle",
        "Runs a pipeline, one process a stage, with more and more micro-batches an update, and compares the time its\n"
        "stages wait with (stages - 1) / (micro-batches + stages - 1). Writes idle.json and idle.png.",
        "python -m studies pipeline-idle recipes/demo/admin_18l-18l.yaml --stages 2 --counts 1 2 4 8 16",
    )
    parser.add_argument("--config", default="pipeline_zero1_fp32", metavar="NAME",
                        help="file of ds_configs/ and precision (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=2, metavar="P", help="default 2")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="M",
                        help="micro-batches an update (default 1 2 4 8 16)")
    parser.add_argument("--output", type=Path, default=Path("runs/idle"), metavar="FOLDER",
                        help="of idle.json and idle.png (default %(default)s)")
    batch_options(parser)
    found, recipe = parse(parser, words)
    positive(found, "stages", "counts", "tokens", "vocab", "threads")
    from studies.benchmarks.layouts import measure_idle

    measure_idle(recipe, found.config, found.stages, found.counts, found.tokens, found.vocab, found.threads,
                 found.output)
    return 0


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
