"""The evaluation job: translates test sets, or reads translations, and scores them into a table and a JSON file."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR

from deepnmt.checkpoint.checkpoint import RECIPE, has_average
from deepnmt.config import Model, Recipe, load_recipe
from deepnmt.config.choices import METRICS
from deepnmt.data.prepared import all_tags
from deepnmt.data.text import named_files, read_lines, read_pairs
from deepnmt.data.vocab import without_tags
from deepnmt.decode.models import Folders, load_models
from deepnmt.decode.translate import judge_of, one_line, translate_shards
from deepnmt.device import choose
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import (
    USUAL,
    EvaluationSet,
    Report,
    make_scorers,
    outside_of,
    score_systems,
    steps_of_scoring,
)
from deepnmt.files import as_json, atomic_write, make_parent_folder, reporting, write_text
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status, show_progress


def evaluate_run(
    recipe: Recipe,
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoints: Sequence[str | Path] = (),
    output: str | Path | None = None,
    *,
    others: Mapping[str, Recipe] | None = None,
    metrics: Sequence[str] = USUAL,
    expected: Model | None = None,
    ranks: Ranks | None = None,
) -> str:
    """Scores a run's model, or existing translations, on test sets.

    The texts are kept in a folder beside the scores, named as their file: NAME.src, NAME.ref (of further references
    NAME.ref2, ...) and NAME.hyp (of several systems NAME.SYSTEM.hyp) of every test set.

    Args:
        recipe: its run, languages, test sets and search settings are used.
        tests: each a name of `data.test`, "NAME=SRC,REF" (text files, plain or .gz) or a name of SacreBLEU's such as
            "wmt14/full"; by default all of `data.test`.
        hypotheses: each "SYSTEM=FILE[,FILE...]", one file for each test set, scored instead of the run's model.
        checkpoints: as for `load_model`, several make an ensemble; by default the run's average, else its newest
            checkpoint.
        output: the JSON file; by default see `scores_file`.
        others: the recipes of other runs that are compared with this one on its test sets, by the checkpoint to take;
            they search as their own recipes say.
        metrics: of `METRICS`, or names of the recipe's `metrics`.
        expected: the model that the checkpoint must hold; None: any.
        ranks: several processes, see `translate_shards`; by default this one, on a GPU if there is one. They share the
            lines; rank 0 scores.

    Returns:
        The table on rank 0, an empty string on other ranks.

    Raises:
        UserError: no such test set, file or checkpoint; different numbers of lines; an empty text; another model than
            `expected`; other languages; or both a checkpoint and `hypotheses` were given.
    """
    others = others or {}
    if hypotheses and (checkpoints or others):
        model = f"checkpoint {checkpoints[0]}" if checkpoints else f"run {next(iter(others))}"
        raise UserError(f"hypotheses are scored without a model, so the {model} would have no effect; give one of the "
                        "two")
    ranks = ranks or Ranks.alone(choose(recipe.parallel.device))
    for other in others.values():
        _require_languages(other, recipe)
    sets = load_test_sets(recipe, tests)
    own = [metric for metric in metrics if metric in METRICS]
    outer = [metric for metric in metrics if metric not in METRICS]
    outside = outside_of(recipe) if outer else None
    for lang in {test.lang or recipe.data.trg_lang for test in sets}:
        make_scorers(lang, metrics, outside)
    if hypotheses and not ranks.first:
        return ""
    names = system_names([recipe.run, *[other.run for other in others.values()]])
    if output is not None:
        file = Path(output)
        if file.is_dir():
            raise UserError(f"scores cannot be written to {file}, which is a folder; give the name of a file in it")
        read, texts = [*map(os.path.realpath, _files_read(recipe, tests, hypotheses))], texts_folder(file)
        if os.path.realpath(file) in read:
            raise UserError(f"scores cannot be written to {file}, which is one of the texts; give another file")
        if any(Path(text).is_relative_to(os.path.realpath(texts)) for text in read):
            raise UserError(f"the texts of {file} would go into {texts}, from which texts are read; give another file")
        if texts.exists() and not file.exists():
            raise UserError(f"the texts of {file} would go into {texts}, which exists already; give another file, or "
                            "remove that folder")
    else:
        file = scores_file(recipe, sets, tests, hypotheses, checkpoints, names[1:], metrics)
    is_plain = file.is_file() or not file.exists()  # no device, beside which no texts are kept
    if ranks.first and is_plain and (output is not None or file.parent.exists()):
        make_parent_folder(file)
    facts: dict[str, Any] = {}
    if hypotheses:
        systems = read_systems(hypotheses, sets)
    else:
        systems = {}
        systems[names[0]], facts = _translate_sets(recipe, checkpoints or recipe.run, sets, ranks, expected)
        for name, (folder, other) in zip(names[1:], others.items(), strict=True):
            systems[name], _ = _translate_sets(other, folder, sets, ranks, None)
        if not ranks.first:
            return ""
    steps = steps_of_scoring(len(systems), len(sets), len(own))
    line = f"scoring: {{:,}} of {steps:,} texts and metrics"
    with show_progress(line, total=steps, desc="scoring", leave=False) as progress:
        report = score_systems(systems, sets, recipe.data.trg_lang, own, progress)
    commands = ""
    if own:
        _write_scores(file, report, facts, output is not None)
        commands = _keep_texts(file, recipe, systems, sets)
    lower = [name for name in outer if recipe.metrics[name].lower_is_better]
    report = replace(report, lower=frozenset(lower))
    for metric in outer:  # one after the other, so that a fault in a program costs none of the other scores
        report |= score_systems(systems, sets, recipe.data.trg_lang, [metric], outside=outside)
        _write_scores(file, report, facts, output is not None)
        if not own and metric == outer[0]:  # not before, or earlier scores would stand beside other texts
            commands = _keep_texts(file, recipe, systems, sets)
    print_status(f"scores are in {file}")
    if commands:
        print_status(f"texts are in {texts_folder(file)}; for COMET:\n{commands}")
    return report.table()


def _files_read(recipe: Recipe, tests: Sequence[str] | None, hypotheses: Sequence[str] | None) -> list[Path]:
    """The files of test sets and translations, as far as a recipe or command names them."""
    files: list[Path] = []
    for spec in (*(tests or recipe.data.test), *(hypotheses or ())):
        if "=" in spec:
            files += map(Path, spec.partition("=")[2].split(","))
        elif spec in recipe.data.test:
            files += named_files(recipe.data.test[spec])
    return files


def _require_languages(other: Recipe, recipe: Recipe) -> None:
    """Raises `UserError` if another run is of other languages."""
    for lang in ("src_lang", "trg_lang"):
        theirs, ours = getattr(other.data, lang, "") or "none", getattr(recipe.data, lang)  # not all tasks have them
        if theirs != ours:
            raise UserError(f"{other.run} has data.{lang} {theirs} and {recipe.run} {ours}; compare runs of one pair "
                            "of languages")


def _write_scores(file: Path, report: Report, facts: Mapping[str, Any], given: bool) -> None:
    """Writes scores into a file of the run, or one that was `given`. A file that has them and others keeps those.
    Raises `UserError`."""
    text = as_json({**report.as_json(), **facts}, indent=1)
    with suppress(OSError, ValueError):  # there are none yet, or what is there is not deepnmt's
        if file.is_file() and _holds(json.loads(earlier := file.read_text(encoding="utf-8")), json.loads(text)):
            text = earlier
    with reporting(str(file), "give another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if given:
            with atomic_write(file) as stream:
                stream.write(text)
        else:
            write_text(file, text)


def _holds(earlier: Any, content: Any) -> bool:
    """Whether earlier JSON says all that this says: the same translations have been scored by further metrics."""
    if isinstance(content, dict):
        return isinstance(earlier, dict) and all(_holds(earlier.get(key), value) for key, value in content.items())
    if isinstance(content, list):
        return isinstance(earlier, list) and all(item in earlier for item in content)
    return bool(earlier == content)


def system_names(runs: Sequence[str]) -> list[str]:
    """The runs' own names, or their paths if two are the same."""
    names = [Path(os.path.abspath(run)).name for run in runs]
    if len(set(names)) == len(names):
        return names
    if len(set(runs)) == len(runs):
        return list(runs)
    raise UserError(f"a run is given twice in {', '.join(runs)}; give each once")


def _translate_sets(
    recipe: Recipe, folders: Folders, sets: Sequence[EvaluationSet], ranks: Ranks, expected: Model | None
) -> tuple[list[list[str]], dict[str, Any]]:
    """The translations of test sets, and what is said in the scores of the model that they are by."""
    models = load_models(folders, recipe.translate, ranks, expected, alone=True)
    if ranks.first:
        what = "running average of the weights" if has_average(models.members[0].folder) else "model"
        paths = [str(member.folder) for member in models.members]
        print_status(f"scoring the {what} of {', '.join(paths)}")
    translations = []
    for test in sets:
        total = len(test.sources)
        line = f"{test.name}: {{:,}} of {total:,} lines translated"
        with show_progress(line, shown=ranks.first, total=total, desc=test.name, unit=" lines") as progress:
            translated = translate_shards(models.all[0], models.vocabs, test.sources, recipe.translate, ranks,
                                          judge=judge_of(recipe), seed=recipe.seed, stepper=models.stepper,
                                          searcher=models.searcher, progress=progress)
            translations.append([best[0].text for best in translated])
    first, *rest = models.members
    facts: dict[str, Any] = {"checkpoint": str(first.folder), "update": first.state.update,
                             "averaged_updates": first.state.extra.get("averaged_updates", [])}
    if rest:
        facts["ensemble"] = [str(other.folder) for other in rest]
    facts["translate"] = recipe.translate.model_dump()
    return translations, facts


def texts_folder(scores: Path) -> Path:
    """The folder of the texts that belong to a file of scores."""
    if scores.suffix:
        return scores.with_suffix("")
    return scores.with_name(f"{scores.name}-texts")


def text_name(name: str) -> str:
    """The name of a test set or system in the names of files."""
    return re.sub(r"[^\w.-]+", "_", name)


def _keep_texts(
    file: Path, recipe: Recipe, systems: Mapping[str, list[list[str]]], sets: Sequence[EvaluationSet]
) -> str:
    """Writes the texts of all test sets beside their scores, sources without tags; returns the commands that score them
    with COMET. Beside a device there are none."""
    if not file.is_file():
        return ""
    folder, tags = texts_folder(file), all_tags(recipe)
    commands = []
    with reporting(str(folder), "give another file"):
        folder.mkdir(exist_ok=True)
        for number, test in enumerate(sets):
            stem = folder / text_name(test.name)
            first, *further = test.references
            texts = {"src": [without_tags(source, tags) for source in test.sources], "ref": first}
            for count, lines in enumerate(further, start=2):
                texts[f"ref{count}"] = lines
            hypotheses = []
            for system, translations in systems.items():
                ending = f"{text_name(system)}.hyp" if len(systems) > 1 else "hyp"
                texts[ending] = translations[number]
                hypotheses.append(f"{stem}.{ending}")
            for old in folder.glob(f"{stem.name}.ref[0-9]"):  # of an earlier text with more references
                old.unlink()
            for ending, lines in texts.items():
                write_text(Path(f"{stem}.{ending}"), "".join(f"{one_line(line)}\n" for line in lines))
            commands.append(shlex.join(["comet-score", "-s", f"{stem}.src", "-t", *hypotheses, "-r", f"{stem}.ref"]))
    return "\n".join(commands)


def scores_file(
    recipe: Recipe,
    sets: Sequence[EvaluationSet],
    tests: Sequence[str] | None = None,
    hypotheses: Sequence[str] | None = None,
    checkpoints: Sequence[str | Path] = (),
    others: Sequence[str] = (),
    metrics: Sequence[str] = USUAL,
) -> Path:
    """The file in the run folder that scores go into; `sets` are the loaded `tests`.

    `scores.json` is for the run's default checkpoint on all its test sets, with the settings of the run's own
    recipe.yaml (of `recipe` if there is none). Anything else goes into `scores-NAMES.json`, named after what differs:

        the checkpoint   `update-00000024`, `averaged`; one of another run with that run's name, `other-averaged`
        the systems      of `hypotheses`, or `others`, the names of other runs
        the settings     of languages, search and seed that differ from the run's, `beam_1`
        the test sets    if `tests` was given, or they differ from the run's; a text that is neither in the run's recipe
                         nor in SacreBLEU under this name gets six digits of its SHA-256, `mine_0f3a9c`
        the metrics      if `metrics` lack a usual one

    Raises:
        UserError: recipe.yaml in the run folder is faulty.
    """
    own = recipe_of_run(recipe)
    parts = [spec.partition("=")[0] for spec in hypotheses or ()]
    parts += others

    def settings(of: Recipe) -> dict[str, Any]:
        values = {lang: getattr(of.data, lang, "") for lang in ("src_lang", "trg_lang")}  # speech has none
        if not hypotheses:
            values |= {"seed": of.seed, **of.translate.model_dump()}
        return values

    default = settings(own)
    for name, value in settings(recipe).items():
        if value != default[name]:
            parts.append(f"{name}_{value}")
    if tests or recipe.data.test != own.data.test:
        for spec, test in zip(tests or recipe.data.test, sets, strict=True):
            if "=" not in spec and recipe.data.test.get(spec) == own.data.test.get(spec):
                parts.append(test.name)
            else:
                lines = json.dumps([test.sources, *test.references])
                parts.append(f"{test.name}_{hashlib.sha256(lines.encode()).hexdigest()[:6]}")
    if not set(USUAL) <= set(metrics):
        parts += metrics
    return file_beside("scores", recipe, checkpoints, parts)


def recipe_of_run(recipe: Recipe) -> Recipe:
    """The recipe in the run folder; `recipe` itself if there is none. Raises `UserError` if it is faulty."""
    run = Path(recipe.run)
    return load_recipe(run) if (run / RECIPE).is_file() else recipe


def file_beside(stem: str, recipe: Recipe, checkpoints: Sequence[str | Path], parts: Sequence[str]) -> Path:
    """`STEM.json` in the run folder, or a file beside it that is named after checkpoints other than the run's default
    one and after `parts`, which say what else differs from the usual measurement."""
    run = Path(recipe.run)
    names = [stem]
    for folder in checkpoints:
        names += checkpoint_parts(Path(folder).resolve(), run.resolve())
    return run / f"{'-'.join(map(text_name, [*names, *parts]))}.json"


def checkpoint_parts(checkpoint: Path, run: Path) -> list[str]:
    """The folder names that identify a checkpoint: those below its run folder (none for the run itself), and for
    another run its name first. `checkpoints` is left out."""
    if checkpoint.is_relative_to(run):
        names = checkpoint.relative_to(run).parts
    elif (checkpoint / "checkpoints").is_dir():
        names = (checkpoint.name,)
    else:
        other = checkpoint.parent
        if other.name == "checkpoints":
            other = other.parent
        names = (other.name, checkpoint.name)
    return [name for name in names if name != "checkpoints"]


def load_test_sets(recipe: Recipe, tests: Sequence[str] | None) -> list[EvaluationSet]:
    """Loads the test sets that `tests` names (see `evaluate_run`). Raises `UserError`."""
    specs = list(tests or recipe.data.test)
    if not specs:
        raise UserError("the recipe has no data.test; give a test set, NAME=SRC,REF (two text files) or one of "
                        "SacreBLEU's such as wmt14/full")
    sets = [_load_test_set(recipe, spec) for spec in specs]
    require_different([test.name for test in sets])
    return sets


def require_different(names: Sequence[str]) -> None:
    """Raises `UserError` where two test sets have one name, or names that files cannot tell apart."""
    if len(set(map(text_name, names))) < len(names):
        raise UserError(f"two of the test sets {', '.join(names)} have the same name; give each once, or another name")


def _load_test_set(recipe: Recipe, spec: str) -> EvaluationSet:
    name, equals, files = spec.partition("=")
    if equals:
        paths = files.split(",")
        if not name or len(paths) != 2:
            raise UserError(f"test set {spec!r} is not of the form NAME=SRC,REF, for example mine=test.en,test.de")
        return EvaluationSet(name, _lines(paths[0]), [_lines(paths[1])])
    if spec in recipe.data.test:
        sources, targets = [], []
        for src, trg in read_pairs(recipe.data.test[spec]):
            sources.append(src)
            targets.append(trg)
        return EvaluationSet(spec, sources, [targets], recipe.data.test[spec].trg_lang)
    if spec not in DATASETS:
        near = difflib.get_close_matches(spec, [*recipe.data.test, *DATASETS], n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"there is no test set {spec!r}; {hint}give a name of data.test "
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
        if text_name(system) in map(text_name, systems):
            raise UserError(f"system {system} is given twice; give each system another name")
        if len(paths) != len(sets):
            names = ", ".join(test.name for test in sets)
            raise UserError(f"system {system} has {len(paths)} files for {len(sets)} test sets ({names}); give one "
                            "file for each test set, in their order")
        systems[system] = [_lines(path) for path in paths]
    return systems
