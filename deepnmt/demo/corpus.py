"""The demo's corpus: English-German sentence pairs, written by the project's own grammar."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from deepnmt.demo import clauses, grammar, inflection, lexicon, phrases
from deepnmt.errors import UserError

_STAMP = "corpus.json"
_GRAMMAR = tuple(Path(inspect.getfile(module)) for module in (clauses, grammar, inflection, lexicon, phrases))


def make_corpus(
    folder: Path, pairs: int = 110_000, seed: int = 1, valid: int = 500, test: int = 1000
) -> dict[str, Any]:
    """Writes train, valid and test texts (`train.en`, `train.de`, ...), one sentence a line.

    No sentence of either language comes twice, within a text or across texts. The same arguments give the same bytes
    on every machine and version of Python. A folder that holds this very corpus is left as it is; a corpus of other
    settings is replaced at one stroke when the new one is complete.

    Args:
        folder: made if need be.
        pairs, valid, test: how many pairs of training, validation and test text.

    Returns:
        The stamp written beside the texts, `corpus.json`: settings, `counts` of pairs and `words` by text, and the
        SHA-256 of each file.

    Raises:
        UserError: a count is below 1, or the folder holds something else than a corpus.
    """
    for name, count in (("pairs", pairs), ("valid", valid), ("test", test)):
        if count < 1:
            raise UserError(f"the demo corpus cannot have {name} = {count}; give 1 or more")
    settings = {"pairs": pairs, "seed": seed, "valid": valid, "test": test, "grammar": _fingerprint()}
    found = _complete_corpus(folder)
    if found is not None and found["settings"] == settings:
        return found
    if folder.exists() and not (folder.is_dir() and ((folder / _STAMP).is_file() or not any(folder.iterdir()))):
        raise UserError(f"{folder} holds something else than a demo corpus; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        stamp = _write(aside, settings, {"test": test, "valid": valid, "train": pairs}, seed)
        aside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return stamp


def _write(folder: Path, settings: dict[str, Any], sizes: dict[str, int], seed: int) -> dict[str, Any]:
    stream = grammar.Grammar(seed).pairs()
    words: dict[str, dict[str, int]] = {}
    hashes = {}
    for split, size in sizes.items():  # test first: it stays the same when the training text grows
        lines = list(islice(stream, size))
        words[split] = {}
        for lang, sentences in zip(("en", "de"), zip(*lines, strict=True), strict=True):
            data = "".join(f"{sentence}\n" for sentence in sentences).encode()
            (folder / f"{split}.{lang}").write_bytes(data)
            hashes[f"{split}.{lang}"] = hashlib.sha256(data).hexdigest()
            words[split][lang] = len(data.split())
    stamp = {"settings": settings, "counts": sizes, "words": words, "sha256": hashes}
    (folder / _STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    return stamp


def _fingerprint() -> str:
    """Changes with the grammar, so that a corpus of an older one is not taken for today's."""
    digest = hashlib.sha256()
    for file in _GRAMMAR:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _complete_corpus(folder: Path) -> dict[str, Any] | None:
    """The stamp of a corpus whose files are all there and unchanged, or None."""
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        for name, expected in stamp["sha256"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return stamp
