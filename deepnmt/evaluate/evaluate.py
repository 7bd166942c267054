"""The evaluation job: translates test sets, or reads translations, and scores them into a table and a JSON file."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR
from tqdm import tqdm

from deepnmt.checkpoint.checkpoint import RECIPE, has_average
from deepnmt.config import Model, Recipe, load_recipe
from deepnmt.data.text import read_lines, read_pairs
from deepnmt.decode.translate import load_for_search, translate_shards
from deepnmt.device import choose
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import EvaluationSet, score_systems
from deepnmt.files import as_json, atomic_write, write_json
from deepnmt.progress import bar_progress, print_status
from deepnmt.ranks import Ranks


def evaluate_run(
    recipe: Recipe,
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    *,
    expected: Model | None = None,
    ranks: Ranks | None = None,
) -> str:
    """Scores a run's model, or existing translations, on test sets.

    Args:
        recipe: its run, languages, test sets and search settings are used.
        tests: each a name of `data.test`, "NAME=SRC,REF" (text files, plain or .gz) or a name of SacreBLEU's such as
            "wmt14/full"; by default all of `data.test`.
        hypotheses: each "SYSTEM=FILE[,FILE...]", one file for each test set, scored instead of the run's model.
        checkpoint: as for `load_model`; by default the run's average, else its newest checkpoint.
        output: the JSON file; by default see `scores_file`.
        expected: the model that the checkpoint must hold; None: any.
        ranks: several processes, see `translate_shards`; by default this one, on a GPU if there is one. They share the
            lines; rank 0 scores.

    Returns:
        The table on rank 0, an empty string on other ranks.

    Raises:
        UserError: no such test set, file or checkpoint; different numbers of lines; an empty text; another model than
            `expected`; or both a checkpoint and `hypotheses` were given.
    """
    if hypotheses and checkpoint is not None:
        raise UserError(f"hypotheses are scored without a model, so the checkpoint {checkpoint} would have no effect; "
                        "give one of the two")
    ranks = ranks or Ranks.alone(choose(recipe.parallel.device))
    sets = load_test_sets(recipe, tests)
    if hypotheses and not ranks.first:
        return ""
    file = Path(output) if output is not None else scores_file(recipe, sets, tests, hypotheses, checkpoint)
    facts: dict[str, Any] = {}
    if hypotheses:
        systems = read_systems(hypotheses, sets)
    else:
        loaded = load_for_search(Path(checkpoint or recipe.run), recipe.translate, ranks, expected)
        if ranks.first:
            what = "running average of the weights" if has_average(loaded.folder) else "model"
            print_status(f"scoring the {what} of {loaded.folder}")
        translations = []
        for test in sets:
            hidden = None if ranks.first else True  # None hides the bar if standard error is not a terminal
            with tqdm(total=len(test.sources), desc=test.name, unit="line", disable=hidden) as bar:
                translated = translate_shards(loaded.model, loaded.vocabs, test.sources, recipe.translate, ranks,
                                              seed=recipe.seed, progress=bar_progress(bar))
                translations.append([best[0].text for best in translated])
        if not ranks.first:
            return ""
        systems = {Path(recipe.run).name: translations}
        facts = {"checkpoint": str(loaded.folder), "update": loaded.state.update,
                 "averaged_updates": loaded.state.extra.get("averaged_updates", []),
                 "translate": recipe.translate.model_dump()}
    report = score_systems(systems, sets, recipe.data.trg_lang)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if output is None:
            write_json(file, {**report.as_json(), **facts}, indent=1)
        else:
            with atomic_write(file) as stream:
                stream.write(as_json({**report.as_json(), **facts}, indent=1))
    except OSError as error:
        raise UserError(f"scores cannot be written to {file}: {error.strerror or error}; give another file") from None
    print_status(f"scores are in {file}")
    return report.table()


def scores_file(
    recipe: Recipe,
    sets: Sequence[EvaluationSet],
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
) -> Path:
    """The file in the run folder that scores go into; `sets` are the loaded `tests`.

    `scores.json` is for the run's default checkpoint on all its test sets, with the settings of the run's own
    recipe.yaml (of `recipe` if there is none). Anything else goes into `scores-NAMES.json`, named after what differs:

        the checkpoint   `update-00000024`, `averaged`; one of another run with that run's name, `other-averaged`
        the systems      of `hypotheses`
        the settings     of languages, search and seed that differ from the run's, `beam_1`
        the test sets    if `tests` was given, or they differ from the run's; a text that is neither in the run's recipe
                         nor in SacreBLEU under this name gets six digits of its SHA-256, `mine_0f3a9c`

    Raises:
        UserError: recipe.yaml in the run folder is faulty.
    """
    run = Path(recipe.run)
    own = load_recipe(run) if (run / RECIPE).is_file() else recipe
    parts = [] if checkpoint is None else _checkpoint_parts(Path(checkpoint).resolve(), run.resolve())
    parts += [spec.partition("=")[0] for spec in hypotheses or ()]

    def settings(of: Recipe) -> dict[str, Any]:
        search = {} if hypotheses else {"seed": of.seed, **of.translate.model_dump()}
        return {"src_lang": of.data.src_lang, "trg_lang": of.data.trg_lang, **search}

    default = settings(own)
    parts += [f"{name}_{value}" for name, value in settings(recipe).items() if value != default[name]]
    if tests or recipe.data.test != own.data.test:
        for spec, test in zip(tests or recipe.data.test, sets, strict=True):
            known = "=" not in spec and recipe.data.test.get(spec) == own.data.test.get(spec)
            lines = json.dumps([test.sources, *test.references])
            parts.append(test.name if known else f"{test.name}_{hashlib.sha256(lines.encode()).hexdigest()[:6]}")
    return run / ("-".join(["scores", *(re.sub(r"[^\w.-]+", "_", part) for part in parts)]) + ".json")


def _checkpoint_parts(checkpoint: Path, run: Path) -> list[str]:
    """The folder names that identify a checkpoint: those below its run folder (none for the run itself), and for
    another run its name first. `checkpoints` is left out."""
    if checkpoint.is_relative_to(run):
        names = checkpoint.relative_to(run).parts
    elif (checkpoint / "checkpoints").is_dir():
        names = (checkpoint.name,)
    else:
        other = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
        names = (other.name, checkpoint.name)
    return [name for name in names if name != "checkpoints"]


def load_test_sets(recipe: Recipe, tests: Sequence[str] | None) -> list[EvaluationSet]:
    """Loads the test sets that `tests` names (see `evaluate_run`). Raises `UserError`."""
    specs = list(tests or recipe.data.test)
    if not specs:
        raise UserError("the recipe has no data.test; give a test set, NAME=SRC,REF (two text files) or one of "
                        "SacreBLEU's such as wmt14/full")
    sets = [_load_test_set(recipe, spec) for spec in specs]
    names = [test.name for test in sets]
    if len(set(names)) < len(names):
        raise UserError(f"two of the test sets {', '.join(names)} have the same name; give each another name")
    return sets


def _load_test_set(recipe: Recipe, spec: str) -> EvaluationSet:
    name, equals, files = spec.partition("=")
    if equals:
        paths = files.split(",")
        if not name or len(paths) != 2:
            raise UserError(f"test set {spec!r} is not of the form NAME=SRC,REF, for example mine=test.en,test.de")
        return EvaluationSet(name, _lines(paths[0]), [_lines(paths[1])])
    if spec in recipe.data.test:
        pairs = list(read_pairs(recipe.data.test[spec]))
        return EvaluationSet(spec, [src for src, _ in pairs], [[trg for _, trg in pairs]],
                             recipe.data.test[spec].trg_lang)
    if spec not in DATASETS:
        near = difflib.get_close_matches(spec, [*recipe.data.test, *DATASETS], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"there is no test set {spec!r}{hint}; give a name of data.test "
                        f"({', '.join(recipe.data.test)}), NAME=SRC,REF (two text files), or one of the names that "
                        "sacrebleu --list prints")
    dataset, pair = DATASETS[spec], f"{recipe.data.src_lang}-{recipe.data.trg_lang}"
    if pair not in dataset.langpairs:
        raise UserError(f"SacreBLEU's {spec} has no {pair} (data.src_lang and data.trg_lang); it has "
                        f"{', '.join(sorted(dataset.langpairs))}")
    try:  # reads SacreBLEU's folder, or downloads into it
        source, references = dataset.get_source_file(pair), dataset.get_reference_files(pair)
    except (OSError, SystemExit) as error:  # SacreBLEU exits the process if a download has the wrong hash
        raise UserError(f"SacreBLEU's {spec} is not in {SACREBLEU_DIR} and cannot be downloaded ({error}); on a "
                        f"machine with a network run sacrebleu --download {spec} -l {pair}, copy its folder here, and "
                        "set the environment variable SACREBLEU to it") from None
    return EvaluationSet(spec, _lines(source), [_lines(path) for path in references])


def _lines(path: str) -> list[str]:
    return list(read_lines(Path(path)))


def read_systems(hypotheses: Sequence[str], sets: Sequence[EvaluationSet]) -> dict[str, list[list[str]]]:
    """Reads translations, each "SYSTEM=FILE[,FILE...]": from a system to its lines for each set. Raises
    `UserError`."""
    systems: dict[str, list[list[str]]] = {}
    for spec in hypotheses:
        system, equals, files = spec.partition("=")
        paths = files.split(",")
        if not system or not equals:
            raise UserError(f"hypotheses {spec!r} are not of the form SYSTEM=FILE[,FILE...], for example "
                            "baseline=out.de")
        if system in systems:
            raise UserError(f"system {system} is given twice; give each system another name")
        if len(paths) != len(sets):
            names = ", ".join(test.name for test in sets)
            raise UserError(f"system {system} has {len(paths)} files for {len(sets)} test sets ({names}); give one "
                            "file for each test set, in their order")
        systems[system] = [_lines(path) for path in paths]
    return systems
