"""The evaluation job: test sets are translated, or ready translations read, and scored into a table and a JSON file."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR
from tqdm import tqdm

from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import RECIPE, LoadedModel, load_model, require_model
from deepnmt.config import Model, Recipe, load_recipe
from deepnmt.data.text import read_lines, read_pairs
from deepnmt.decode.lines import Bar
from deepnmt.decode.translate import Gather, alone, cast, translate_shards
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import EvaluationSet, Report, score_systems
from deepnmt.files import write_json


def evaluate_run(
    recipe: Recipe,
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    *,
    expected: Model | None = None,
    device: torch.device | str | None = None,
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
) -> str:
    """Scores a run's model, or ready translations, on test sets.

    Args:
        recipe: names run, languages, test sets and search.
        tests: each a name of `data.test`, "NAME=SRC,REF" (text files, plain or .gz) or a name of SacreBLEU's such as
            "wmt14/full"; without, all of `data.test`.
        hypotheses: each "SYSTEM=FILE[,FILE...]", a file a test set, scored instead of the run's model.
        checkpoint: of the model, as for `load_model`; without, the run's average or else its newest checkpoint.
        output: the JSON file; without, see `scores_file`.
        expected: what the checkpoint must hold; without, any model.
        device: of the model; without, a GPU if there is one.
        rank, world, gather: of several processes, see `translate_shards`. They share the lines, and rank 0 scores.

    Returns:
        The table; of other ranks than 0 nothing.

    Raises:
        UserError: no such test set, file or checkpoint; numbers of lines that differ; texts without a line; another
            model than `expected`; a checkpoint beside `hypotheses`.
    """
    if hypotheses and checkpoint is not None:
        raise UserError(f"hypotheses are scored without a model, so the checkpoint {checkpoint} would not be used; "
                        "give one of the two")
    sets = find_sets(recipe, tests)
    facts: dict[str, Any] = {}
    if hypotheses and rank > 0:
        return ""
    file = Path(output) if output is not None else scores_file(recipe, sets, tests, hypotheses, checkpoint)
    if hypotheses:
        systems = read_systems(hypotheses, sets)
    else:
        loaded = load_model(Path(checkpoint or recipe.run))
        require_model(loaded.folder, expected)
        if rank == 0:
            warn_if_outdated(loaded.folder)
            print(f"scoring the model of {loaded.folder}", file=sys.stderr, flush=True)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        translations = translate_sets(loaded, recipe, sets, device, rank, world, gather)
        if rank > 0:
            return ""
        systems = {Path(recipe.run).name: translations}
        facts = {"checkpoint": str(loaded.folder), "update": loaded.state.update,
                 "averaged_updates": loaded.state.extra.get("averaged_updates", []),
                 "translate": recipe.translate.model_dump()}
    report = score_systems(systems, sets, recipe.data.trg_lang)
    write_scores(report, facts, file)
    print(f"scores are in {file}", file=sys.stderr, flush=True)
    return report.table()


def scores_file(
    recipe: Recipe,
    sets: Sequence[EvaluationSet],
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
) -> Path:
    """Where scores go in the run folder; `sets` are those of `tests`.

    Into `scores.json` go those of the model that stands for the run, on all test sets, as the run's own recipe.yaml
    says (where there is none, as `recipe` says). Anything else goes into `scores-NAMES.json`, of

        the checkpoint   `update-00000024`, `averaged`; of another run with that one's name, `other-averaged`
        the systems      of `hypotheses`
        the settings     of languages, search and seed that are not the run's, `beam_1`
        the test sets    if they were asked for, or are not the run's; a text that neither the run's recipe nor
                         SacreBLEU has under this name with six digits of its SHA-256, `mine_0f3a9c`

    Raises:
        UserError: recipe.yaml in the run folder is faulty.
    """
    run = Path(recipe.run)
    own = load_recipe(run) if (run / RECIPE).is_file() else recipe
    words = [] if checkpoint is None else _names_of(Path(checkpoint).resolve(), run.resolve())
    words += [spec.partition("=")[0] for spec in hypotheses or ()]
    before, after = _settings(own, not hypotheses), _settings(recipe, not hypotheses)
    words += [f"{name}_{value}" for name, value in after.items() if value != before[name]]
    if tests or recipe.data.test != own.data.test:
        for spec, test in zip(tests or recipe.data.test, sets, strict=True):
            known = "=" not in spec and recipe.data.test.get(spec) == own.data.test.get(spec)
            words.append(test.name if known else f"{test.name}_{_digits(test)}")
    return run / ("-".join(["scores", *(re.sub(r"[^\w.-]+", "_", word) for word in words)]) + ".json")


def _names_of(checkpoint: Path, run: Path) -> list[str]:
    """The folders down to a checkpoint, from its run's (the run itself: none) or, of another run, that one's included;
    `checkpoints` says nothing and is left out."""
    if checkpoint.is_relative_to(run):
        names = checkpoint.relative_to(run).parts
    elif (checkpoint / "checkpoints").is_dir():
        names = (checkpoint.name,)
    else:
        other = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
        names = (other.name, checkpoint.name)
    return [name for name in names if name != "checkpoints"]


def _settings(recipe: Recipe, searched: bool) -> dict[str, Any]:
    """The settings that scores depend on, but for the texts; those of the search where there is one."""
    search = {"seed": recipe.seed, **recipe.translate.model_dump()} if searched else {}
    return {"src_lang": recipe.data.src_lang, "trg_lang": recipe.data.trg_lang, **search}


def _digits(test: EvaluationSet) -> str:
    lines = [test.sources, *test.references]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:6]


def find_sets(recipe: Recipe, tests: Sequence[str] | None) -> list[EvaluationSet]:
    """The test sets meant by `tests` (see `evaluate_run`). Raises `UserError`."""
    specs = list(tests or recipe.data.test)
    if not specs:
        raise UserError("the recipe has no data.test, so name a test set: NAME=SRC,REF (two text files), or one of "
                        "SacreBLEU's such as wmt14/full")
    sets = [_find_set(recipe, spec) for spec in specs]
    names = [test.name for test in sets]
    if len(set(names)) < len(names):
        raise UserError(f"test sets {', '.join(names)} share a name; name each once")
    return sets


def _find_set(recipe: Recipe, spec: str) -> EvaluationSet:
    name, equals, files = spec.partition("=")
    if equals:
        paths = files.split(",")
        if not name or len(paths) != 2:
            raise UserError(f"test set {spec!r} is not of the form NAME=SRC,REF, for example mine=test.en,test.de")
        sources, references = (list(read_lines(Path(path))) for path in paths)
        return EvaluationSet(name, sources, [references])
    if spec in recipe.data.test:
        pairs = list(read_pairs(recipe.data.test[spec]))
        return EvaluationSet(spec, [src for src, _ in pairs], [[trg for _, trg in pairs]])
    if spec in DATASETS:
        return _sacrebleu_set(spec, f"{recipe.data.src_lang}-{recipe.data.trg_lang}")
    near = difflib.get_close_matches(spec, [*recipe.data.test, *DATASETS], n=3)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise UserError(f"there is no test set {spec!r}{hint}; give a name of data.test ({', '.join(recipe.data.test)}), "
                    "NAME=SRC,REF (two text files), or one of the names that sacrebleu --list prints")


def _sacrebleu_set(name: str, pair: str) -> EvaluationSet:
    """A test set that SacreBLEU keeps in its folder, or downloads into it."""
    dataset = DATASETS[name]
    if pair not in dataset.langpairs:
        raise UserError(f"SacreBLEU's {name} has no {pair} (data.src_lang, data.trg_lang); it has "
                        f"{', '.join(sorted(dataset.langpairs))}")
    try:
        source, references = dataset.get_source_file(pair), dataset.get_reference_files(pair)
    except (OSError, SystemExit) as error:  # it ends the process where a download is not what it should be
        raise UserError(f"SacreBLEU's {name} is not in {SACREBLEU_DIR} and cannot be downloaded ({error}); where there "
                        f"is a network say sacrebleu --download {name} -l {pair}, copy its folder here, and name that "
                        "in the environment variable SACREBLEU") from None
    return EvaluationSet(name, list(read_lines(Path(source))), [list(read_lines(Path(path))) for path in references])


def read_systems(hypotheses: Sequence[str], sets: Sequence[EvaluationSet]) -> dict[str, list[list[str]]]:
    """Ready translations, "SYSTEM=FILE[,FILE...]" each: system to the lines for each set. Raises `UserError`."""
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
            raise UserError(f"system {system} has {len(paths)} files for {len(sets)} test sets "
                            f"({', '.join(test.name for test in sets)}); give one file a test set, in their order")
        systems[system] = [list(read_lines(Path(path))) for path in paths]
    return systems


def translate_sets(loaded: LoadedModel, recipe: Recipe, sets: Sequence[EvaluationSet], device: torch.device | str,
                   rank: int, world: int, gather: Gather) -> list[list[str]]:
    """The best translation of every line of every set, by the recipe's search; on rank 0, elsewhere no lines."""
    model = cast(loaded.model, recipe.translate.precision).to(device)
    translations = []
    for test in sets:
        with tqdm(total=len(test.sources), desc=test.name, unit="line", disable=True if rank else None) as bar:
            found = translate_shards(model, (loaded.src_vocab, loaded.trg_vocab), test.sources, recipe.translate,
                                     seed=recipe.seed, rank=rank, world=world, gather=gather, progress=Bar(bar).at)
            translations.append([best[0].text for best in found])
    return translations


def write_scores(report: Report, facts: dict[str, Any], file: Path) -> None:
    """Writes the JSON: of one system its scores at the top, of more under `systems`, with `comparisons`.

    Raises:
        UserError: the file cannot be written.
    """
    if len(report.scores) == 1:
        (system,) = report.scores
        content = {"system": system, **report.as_json(system), **facts}
    else:
        content = {"systems": {system: report.as_json(system) for system in report.scores},
                   "comparisons": [asdict(comparison) for comparison in report.comparisons], **facts}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content, indent=1)
    except OSError as error:
        raise UserError(f"scores cannot be written to {file}: {error.strerror or error}; name another file") from None
