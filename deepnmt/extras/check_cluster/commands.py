"""The command `check-cluster`."""

from __future__ import annotations

from deepnmt.arguments import parse, positive, recipe_parser
from deepnmt.commands import TRY, Command
from deepnmt.commands.options import processes_of


def check_cluster(words: list[str]) -> int:
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
    from deepnmt.extras.check_cluster.check import check_cluster

    with processes_of(recipe, differ=True) as ranks:
        text, faults = check_cluster(recipe, ranks, args.mb)
        if ranks.first:
            print(text)
            print("\n".join(f"difference: {fault}" for fault in faults) or "the machines fit together")
    return 2 if faults else 0


GROUP = TRY
COMMANDS: dict[str, Command] = {"check-cluster": check_cluster}
