"""The journal of a translation: what is done of a text is found again, after a kill or by a job on another machine.

A text is translated in chunks of `sharing.CHUNK` lines. Until all are done, the folder `OUTPUT.parts` beside the output
holds `journal.json`, which says by which model and with which settings, and of each chunk a file for each output:

    00000012.0.SOURCE.CONTENT

The number of the chunk and of the output; the hashes of the chunk's lines and of the file. So a translation goes only
to the lines that it is of. Part i of n translates every n-th chunk, and whoever finishes the last one joins all. No
byte of the output depends on n, on the order, or on what was interrupted. What a killed process was writing, a `.tmp-*`
of one chunk, goes with the folder: removed earlier, it might be what another part is writing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock

from deepnmt.data.parts import WHOLE, Part, parts_folder
from deepnmt.decode.formats import open_output
from deepnmt.errors import UserError
from deepnmt.files import reporting, write_bytes, write_json
from deepnmt.folders import Kind, hash_of, read_json
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status

Items = Sequence[tuple[str, ...]]  # the lines of a chunk, and those of other texts that belong to them
Outputs = Iterable[Sequence[str]]  # of each line, what goes into each output; nothing on ranks other than 0

_FACTS = "journal.json"
_KIND = Kind("journal", (), "delete the folder to have all translated anew", "", _FACTS)
_NAME = re.compile(r"(\d{8,})\.(\d)\.([0-9a-f]{32})\.([0-9a-f]{32})")


class Direct:
    """Outputs that are written as they come: standard output, and what is no plain file.

    Args:
        flush: somebody may be waiting for every line.
    """

    def __init__(self, streams: Sequence[TextIO], flush: bool = False) -> None:
        self._streams, self._flush = streams, flush

    def lacks(self, items: Items) -> bool:
        """Whether the next chunk is to be translated."""
        return True

    def write(self, outputs: Outputs) -> None:
        """Takes the translations of that chunk."""
        for line in outputs:
            for stream, text in zip(self._streams, line, strict=True):
                stream.write(text)
                if self._flush:
                    stream.flush()


class Journal:
    """Outputs in chunks, for one part of the text.

    Args:
        outputs: the files.
        facts: what the translations depend on beside the text; JSON can hold it.
        part: of the chunks.
        ranks: rank 0 reads and writes files. Collective.

    Raises:
        UserError: the folder was begun with other `facts`, or cannot be written.
    """

    def __init__(self, outputs: Sequence[Path], facts: Mapping[str, Any], part: Part, ranks: Ranks) -> None:
        self.folder = parts_folder(outputs[0])
        self._outputs, self._part, self._ranks = outputs, part, ranks
        ranks.raise_everywhere(lambda: self._begin(json.loads(json.dumps(facts))))
        sources: dict[int, str] = {}
        if ranks.first:
            for number, files in self._done().items():
                sources[number] = _source(files[0].name)
        # Rank 0 looks for all, since other parts may write meanwhile.
        known = json.loads(ranks.broadcast_bytes(json.dumps(sources).encode()))
        self._known = {int(number): source for number, source in known.items()}
        self._sources: list[str] = []  # of all chunks so far
        if known and ranks.first:
            print_status(f"{len(known):,} chunks of lines are translated already, in {self.folder}")

    def _begin(self, facts: dict[str, Any]) -> None:
        if not self._ranks.first:
            return
        with _reporting(self.folder):
            self.folder.mkdir(exist_ok=True)
            with FileLock(self.folder / ".lock"):
                if not (self.folder / _FACTS).exists():
                    write_json(self.folder / _FACTS, facts)
                earlier = read_json(self.folder, _FACTS, _KIND)
        for name in {**earlier, **facts}:
            then, now = earlier.get(name), facts.get(name)
            if then == now:
                continue
            what = f"with {name} {then}, but now it is {now}"
            if name == "model":
                what = "by another model"
            raise UserError(f"{self.folder} was begun {what}; give the command that it was begun with, or delete the "
                            "folder to have all translated anew")

    def _done(self) -> dict[int, list[Path]]:
        """The files of each chunk that is done, one for each output."""
        files: dict[int, dict[int, Path]] = {}
        for file in self.folder.iterdir():
            match = _NAME.fullmatch(file.name)
            if match:
                files.setdefault(int(match[1]), {})[int(match[2])] = file
        done: dict[int, list[Path]] = {}
        for number, by_output in files.items():
            if len(by_output) == len(self._outputs):
                done[number] = [by_output[output] for output in sorted(by_output)]
        return done

    def lacks(self, items: Items) -> bool:
        """Whether the next chunk is to be translated here, which `write` then wants. Raises `UserError` if it was, and
        its lines have changed since."""
        number = len(self._sources)
        self._sources.append(hash_of(items)[:32])
        if number in self._known:
            self._require(number, self._known[number])
            return False
        return number % self._part.total == self._part.number - 1

    def _require(self, number: int, source: str) -> None:
        if self._sources[number:][:1] != [source]:
            raise UserError(f"chunk {number + 1} of the text has changed since {self.folder} holds its translation; "
                            "restore the text, or delete the folder to have all translated anew")

    def write(self, outputs: Outputs) -> None:
        """Takes the translations of that chunk. Raises `UserError`."""
        lines = list(outputs)
        if not self._ranks.first:
            return
        number = len(self._sources) - 1
        with _reporting(self.folder):
            for output, texts in enumerate(zip(*lines, strict=True)):
                content = "".join(texts).encode()
                digest = hashlib.sha256(content).hexdigest()[:32]
                write_bytes(self.folder / f"{number:08}.{output}.{self._sources[-1]}.{digest}", content)

    def finish(self) -> None:
        """Joins the chunks, if all of the text are done. Raises `UserError` if a file is damaged, or a chunk is of
        other lines."""
        if not self._ranks.first:
            return
        with _reporting(self.folder):
            try:
                with FileLock(self.folder / ".lock"):
                    done = self._done()
                    missing = len(self._sources) - len(done)
                    if missing <= 0:
                        self._join(done)
                        shutil.rmtree(self.folder, ignore_errors=True)
                        return
            except FileNotFoundError:  # another part has just done that
                return
        print_status(f"part {self._part.number} of {self._part.total} is done; {missing:,} of {len(self._sources):,} "
                     f"chunks of lines are not, and whoever finishes the last one writes {self._outputs[0]}")

    def _join(self, done: Mapping[int, Sequence[Path]]) -> None:
        for number, files in done.items():
            for file in files:
                self._require(number, _source(file.name))
        for output, target in enumerate(self._outputs):
            with open_output(target) as stream:
                for number in range(len(self._sources)):
                    file = done[number][output]
                    content = file.read_bytes()
                    if hashlib.sha256(content).hexdigest()[:32] != file.suffix[1:]:
                        raise UserError(f"{file} is damaged; delete it, and give the same command again")
                    stream.write(content.decode())

    def leave(self) -> None:
        """Keeps what is done when the translation is interrupted."""
        if not self._ranks.first or not self.folder.exists():
            return
        done = self._done()
        if done or self._part != WHOLE:  # others may be at work on theirs
            print_status(f"{len(done):,} chunks of lines are in {self.folder}; the same command continues")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def open_outputs(
    outputs: Sequence[Path | None], facts: Mapping[str, Any], part: Part, ranks: Ranks, at_once: bool
) -> Iterator[Direct | Journal]:
    """What takes the translations of one chunk after the other: plain files in a journal, others directly.

    Args:
        outputs: None is standard output.
        at_once: a reader may be waiting for every line.

    Raises:
        UserError: an output cannot be written; parts are asked for that cannot be; see `Journal`.
    """
    files = []
    for output in outputs:
        if output is not None and (output.is_file() or not output.exists()):
            files.append(output)
    if len(files) < len(outputs):
        if part != WHOLE:
            raise UserError("--part has no effect on standard output, a device or a pipe; give a file with --output")
        with ExitStack() as stack:
            streams = []
            if ranks.first:
                for output in outputs:
                    streams.append(stack.enter_context(open_output(output)))
            yield Direct(streams, at_once)
        return
    journal = Journal(files, facts, part, ranks)
    try:
        yield journal
        journal.finish()
    except BaseException:
        journal.leave()
        raise


@contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    with reporting(f"{folder}, which keeps what is done of the output,",
                   "give a file in an existing, writable folder with space left, or the same command again"):
        yield


def _source(name: str) -> str:
    return name.split(".")[2]
