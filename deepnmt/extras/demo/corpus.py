"""The demo's corpus: English-German sentence pairs from the grammar in this folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from deepnmt.data.prepared import is_free
from deepnmt.errors import UserError
from deepnmt.extras.demo.grammar import Grammar
from deepnmt.files import sha256

_STAMP = "corpus.json"
_GRAMMAR = ("clauses.py", "grammar.py", "inflection.py", "lexicon.py", "lexicon.tsv", "phrases.py")


def make_corpus(
    folder: Path, pairs: int = 110_000, seed: int = 1, valid: int = 500, test: int = 1000
) -> dict[str, Any]:
    """Writes train, valid and test texts (`train.en`, `train.de`, ...), one sentence per line.

    No sentence of either language occurs twice, within a text or across texts. The same arguments give the same bytes
    on every machine and version of Python. If the folder has this corpus already, it is left alone; a corpus of
    other settings is replaced in one rename when the new one is complete.

    Args:
        folder: created if it is missing.
        pairs, valid, test: numbers of pairs of training, validation and test text.

    Returns:
        The content of `corpus.json`, written next to the texts: settings, `counts` of pairs and `words` by text, and
        the SHA-256 of each file.

    Raises:
        UserError: a number is below 1, or the folder has other content than a corpus.
    """
    for name, count in (("pairs", pairs), ("valid", valid), ("test", test)):
        if count < 1:
            raise UserError(f"{name} of the demo corpus is {count}, must be 1 or more")
    # A corpus of an older grammar is written again.
    grammar = hashlib.sha256()
    for name in _GRAMMAR:
        grammar.update(Path(__file__).with_name(name).read_bytes())
    settings = {"pairs": pairs, "seed": seed, "valid": valid, "test": test, "grammar": grammar.hexdigest()[:16]}
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        if stamp["settings"] == settings and all(sha256(folder / name) == was for name, was in stamp["sha256"].items()):
            return stamp
    except (OSError, ValueError, KeyError):
        pass  # missing or damaged
    if not is_free(folder):
        names = {_STAMP, *(f"{split}.{lang}" for split in ("train", "valid", "test") for lang in ("en", "de"))}
        others = sorted({path.name for path in folder.iterdir()} - names)
        if others or not (folder / _STAMP).is_file():
            what = f" ({others[0]})" if others else ""
            raise UserError(f"{folder} has other content than a demo corpus{what}; choose a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        stamp = {"settings": settings, "counts": {"test": test, "valid": valid, "train": pairs}, "words": {},
                 "sha256": {}}
        stream = Grammar(seed).pairs()
        for split, size in stamp["counts"].items():  # test first, so that `pairs` does not change it
            stamp["words"][split] = {}
            sides = zip(*islice(stream, size), strict=True)
            for lang, sentences in zip(("en", "de"), sides, strict=True):
                file = temporary / f"{split}.{lang}"
                file.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8", newline="\n")
                stamp["sha256"][file.name] = sha256(file)
                stamp["words"][split][lang] = sum(len(sentence.split()) for sentence in sentences)
        (temporary / _STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return stamp
