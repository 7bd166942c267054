"""Runs the program of a metric: files of sentences in, a number a line out."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from deepnmt.config import Recipe
from deepnmt.config.plugins import is_named
from deepnmt.data.prepared import all_tags
from deepnmt.data.vocab import without_tags
from deepnmt.decode.translate import one_line
from deepnmt.errors import UserError
from deepnmt.files import reporting, write_json

# What tells deepnmt's own processes of each other. A program that uses torch would look for the others.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Program:
    """The program of one of a recipe's `metrics`.

    Args:
        recipe: with the metric.
        name: the metric's.

    Raises:
        UserError: the user has not named the command, or there is no such program.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        self.name, self.settings = name, recipe.metrics[name]
        self.cache, self._tags = Path(recipe.run) / "metrics", all_tags(recipe)
        command = self.settings.command
        if not is_named(command):
            setting = shlex.quote(f"metrics.{name}.command={command}")
            raise UserError(f"metrics.{name}.command is code in a recipe that lies with a run or a model, and runs "
                            f"only if you give it on the command line, too: {setting}")
        self._words = shlex.split(command)
        if shutil.which(self._words[0]) is None:
            raise UserError(f"metrics.{name}.command begins with {self._words[0]}, and there is no such program here; "
                            "install it, or give its path")

    def scores(self, texts: Mapping[str, Sequence[str]], cached: bool = True) -> list[float]:
        """The number for each line. Raises `UserError` if the program fails, or takes too long.

        Args:
            texts: lines by what stands for their file, as many of each: src, hyp and ref.
            cached: whether to take and keep the numbers in the run's folder, by the hash of command and texts.
        """
        used = {name: list(lines) for name, lines in texts.items() if f"{{{name}}}" in self.settings.command}
        if "src" in used:  # tags are for the model
            used["src"] = [without_tags(source, self._tags) for source in used["src"]]
        if not texts["hyp"]:
            return []
        known = self.cache / f"{self._key(used)}.json"
        if cached:
            with suppress(OSError, ValueError):
                numbers = json.loads(known.read_text(encoding="utf-8"))
                if isinstance(numbers, list) and len(numbers) == len(texts["hyp"]):
                    return [float(value) for value in numbers]
        values = self._run(used)
        if cached:
            with suppress(OSError):  # the next call takes as long as this one
                known.parent.mkdir(parents=True, exist_ok=True)
                write_json(known, values)
        return values

    def _key(self, texts: Mapping[str, Sequence[str]]) -> str:
        """Of the command, the texts, and the program as far as it is in files that the command names."""
        files = []
        for word in (shutil.which(self._words[0]) or "", *self._words[1:]):
            with suppress(OSError):
                if os.path.isfile(word):
                    status = os.stat(word)
                    files.append([word, status.st_size, status.st_mtime_ns])
        return hashlib.sha256(json.dumps([self.settings.command, files, texts]).encode()).hexdigest()[:32]

    def _run(self, texts: Mapping[str, Sequence[str]]) -> list[float]:
        with (reporting(f"the texts for the program of metrics.{self.name}",
                        "free disk space, or name another folder for temporary files in TMPDIR"),
              TemporaryDirectory(prefix="deepnmt-") as folder):
            words = self._words
            for name, lines in texts.items():
                file = Path(folder, name)
                file.write_text("".join(f"{one_line(line)}\n" for line in lines), encoding="utf-8", newline="\n")
                words = [word.replace(f"{{{name}}}", str(file)) for word in words]
            output, errors = Path(folder, "said"), Path(folder, "errors")
            with output.open("wb") as out, errors.open("wb") as err:
                code = self._wait(words, out.fileno(), err.fileno())
            if code:
                fault = f"ended with exit code {code}"
                lines_of_error = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                if lines_of_error:
                    fault += f": {lines_of_error[-1][:300]}"
                raise self._fault(fault)
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) != len(texts["hyp"]):
            raise self._fault(f"printed {len(lines):,} lines for {len(texts['hyp']):,} translations, and must print a "
                              "number for each")
        values = []
        for number, line in enumerate(lines, start=1):
            try:
                values.append(float(line))
            except ValueError:
                raise self._fault(f"printed {line[:100]!r} in line {number:,}, which is no number") from None
            if not math.isfinite(values[-1]):
                raise self._fault(f"printed {line!r} in line {number:,}, which is no finite number")
        return values

    def _wait(self, words: list[str], out: int, err: int) -> int:
        environment = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                                       start_new_session=True)
        except OSError as error:
            raise self._fault(f"cannot be started: {error.strerror or error}") from None
        try:
            return process.wait(self.settings.seconds)
        except subprocess.TimeoutExpired:
            raise self._fault(f"took more than {self.settings.seconds:g} s (metrics.{self.name}.seconds)") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()

    def _fault(self, what: str) -> UserError:
        return UserError(f"the program of metrics.{self.name} {what}; correct it, or leave the metric out "
                         f"({self.settings.command})")
