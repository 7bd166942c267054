"""`deepnmt COMMAND ...`: finds the command, runs it, and turns what went wrong into a sentence and an exit code."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

from deepnmt.commands import Command, command_groups, command_modules
from deepnmt.errors import UserError, enough_threads, nearest
from deepnmt.version import __version__

_FOR_TRAINING = ("deepspeed", "filelock", "matplotlib", "tensorboard")  # an installation for inference lacks them
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
            with enough_threads():
                return commands[command](words) or 0
        except ModuleNotFoundError as error:
            fault = _not_installed(command, str(error.name))
            if fault is None:
                raise
            raise fault from None
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
                raise
            raise UserError(f"{str(error.filename)[:60]}...: {os.strerror(error.errno)}; give another path") from None
    except UserError as error:
        reported = error.reported
        if reported is None:
            reported = _is_later_process()
        if not reported:
            print(f"deepnmt: {error}", file=sys.stderr, flush=True)
        if _is_on_several_machines() and error.reported is None:
            from deepnmt.processes.process_group import end_others

            end_others(str(error))
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        if not _is_later_process():
            print("deepnmt: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _not_installed(command: str, library: str) -> UserError | None:
    """What to say of a library that is missing; None if it is none that may be."""
    optional = list(_FOR_TRAINING)
    for module in command_modules():
        optional += getattr(module, "REQUIREMENTS", ())
    if library not in optional:
        return None
    missing = [name for name in _FOR_TRAINING if find_spec(name) is None]
    if library not in missing:
        missing = [library]
    verb = "is" if len(missing) == 1 else "are"
    return UserError(f"{command} needs {', '.join(missing)}, which {verb} not installed here; run pip install "
                     f"{' '.join(missing)}")


def overview_of(program: str, groups: Mapping[str, Mapping[str, Command]], end: str) -> str:
    """What `--help` prints: every command with the first line of its docstring, under the headline of its group."""
    lines = [f"usage: {program} COMMAND ...", f"       {program} COMMAND --help"]
    for headline, commands in groups.items():
        if commands:  # where visitors are gone, a group may have none
            lines += ["", f"{headline}:"]
        for name, run in commands.items():
            lines.append(f"  {name:<15}{run.__doc__}")
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
    number = os.environ.get("SLURM_LOCALID", "0")
    if "RANK" in os.environ:  # LOCAL_RANK by itself is none of a launcher's
        number = os.environ.get("LOCAL_RANK", number)
    return number.isdecimal() and number != "0"


def _is_on_several_machines() -> bool:
    """Whether a launcher says so: those other machines may not see the same mistake."""
    env = os.environ
    with suppress(ValueError):  # no number, which no launcher has set
        here = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", env.get("WORLD_SIZE", "1"))))
        return here < int(env.get("WORLD_SIZE", "1")) or int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1
    return False


# Commands of earlier versions, and what has taken their place.
MOVED = {"gpu-report": "python -m studies gpu-report, in a checkout of the repository"}
_GROUPS = command_groups()
COMMANDS: dict[str, Command] = {}
for _group in _GROUPS.values():
    COMMANDS |= _group
OVERVIEW = overview_of("deepnmt", _GROUPS, """\
Exit codes: 0 done; 2 a mistake, which a message explains; 75 training was stopped and has saved; 130 Ctrl-C.
Versions: deepnmt --version. In Python: import deepnmt; help(deepnmt).
Documentation: README.md and docs/ of the repository. Studies, in a checkout: python -m studies --help.""")


def entry(command: str | None = None) -> NoReturn:
    """The console script, and the programs of tools/, each of one command."""
    end_process(main(command))


def end_process(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but without taking Python apart.

    DeepSpeed keeps process groups for ever. A thread of gloo that lets go of a tensor while Python is taken apart
    aborts the process ("terminate called without an active exception"), and a run that has succeeded ends with an
    error. It also saves half a second.
    """
    gc.collect()  # closes what nobody has closed
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)
