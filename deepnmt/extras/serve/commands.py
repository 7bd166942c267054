"""The command `serve`."""

from __future__ import annotations

from deepnmt.arguments import expected_model, parse, positive, recipe_parser, settable
from deepnmt.commands import TEXT, Command
from deepnmt.commands.options import add_checkpoints, checkpoints_of, processes_of
from deepnmt.config import Recipe
from deepnmt.errors import UserError


def serve(words: list[str]) -> None:
    """Translate for other programs and people, over HTTP."""
    parser = recipe_parser(
        "serve",
        "Translates over HTTP. Programs POST JSON to /translate, for example {\"text\": [\"a dog\", \"two cats\"]};\n"
        "requests that come together are translated together. / is a page to type a sentence into, /health says that\n"
        "the server is well, and /metrics has figures for Prometheus. SIGTERM and Ctrl-C end it: then the requests\n"
        "that have come are still answered.\n\n"
        "Reads a checkpoint of the run. Prints its address. Needs uvicorn, starlette and\n"
        "prometheus-client: pip install 'deepnmt[serve]'",
        "deepnmt serve runs/my\n"
        "deepnmt serve runs/my --checkpoint best --host 0.0.0.0 --port 8080 translate.beam=1",
        setting="translate.beam=1",
    )
    add = parser.add_argument
    add_checkpoints(parser)
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="the address to listen at (default %(default)s, which only this machine reaches; 0.0.0.0: every one)")
    add("--allow-host", action="append", default=[], metavar="NAME",
        help="a name by which clients reach it, for example through a proxy; without, a server that only this machine "
        "reaches answers to localhost, 127.0.0.1 and [::1]; may be repeated")
    add("--port", type=int, default=8000, metavar="N", help="its port; 0: any that is free (default %(default)s)")
    add("--batch", type=int, default=64, metavar="N", help="sentences translated together (default %(default)s)")
    add("--queue", type=int, default=1000, metavar="N",
        help="sentences that may wait; more are refused with 503 (default %(default)s)")
    add("--sentences", type=int, default=100, metavar="N", help="sentences of a request (default %(default)s)")
    add("--bytes", type=int, default=256 * 1024, metavar="N", help="bytes of a request (default %(default)s)")
    add("--drain", type=int, default=30, metavar="N",
        help="seconds in which requests are still answered after a signal (default %(default)s)")
    args, recipe = parse(parser, words)
    settable(args, Recipe.marked("translate"), "a trained model translates as it is")
    positive(args, "batch", "queue", "sentences", "bytes", "drain")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port is {args.port}, must be from 0 to 65535")
    checkpoints = checkpoints_of(args.checkpoint, recipe)
    from deepnmt.extras.serve.server import serve
    from deepnmt.processes.process_group import rank_from_environment

    count = rank_from_environment()[1]
    if count > 1:
        raise UserError(f"serve was started on {count} processes, but one model answers at one port; start it alone")
    with processes_of(recipe) as ranks:
        serve(recipe, ranks, checkpoints=checkpoints, expected=expected_model(args, recipe, checkpoints),
              host=args.host, allow_hosts=args.allow_host, port=args.port, batch=args.batch, queue=args.queue,
              sentences=args.sentences, body=args.bytes, drain=args.drain)


REQUIREMENTS = ("uvicorn", "starlette", "prometheus_client")
GROUP = TEXT
COMMANDS: dict[str, Command] = {"serve": serve}
