"""deepnmt in Python: train a recipe, load what a run left, translate, score.

    run = deepnmt.train("my.yaml", {"train.updates": 300})
    run = deepnmt.load("runs/my", checkpoint="best")
    run.translate(["the old dog sees the house"], beam=5)
    print(run.evaluate().table())

Every function does what the command of its name does, with the same results, in this process and on one device. A
mistake in a recipe, a file or an argument raises `UserError`, whose message is a sentence that says how to mend it.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from deepnmt.checkpoint.average import average_run, warn_if_outdated
from deepnmt.checkpoint.checkpoint import MANIFEST, Which, load_model
from deepnmt.config import Recipe, check_recipe, load_recipe, override
from deepnmt.config.plugins import name_plugins
from deepnmt.config.sections import NAMED
from deepnmt.data.tables import is_whole
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.models import cast_weights, load_searcher
from deepnmt.decode.packed import pack, packed_copy
from deepnmt.decode.score import Given, Scored, score_lines
from deepnmt.decode.search import Searcher
from deepnmt.decode.translate import Hypothesis, translate_shards
from deepnmt.device import require_cores
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import load_test_sets, system_names
from deepnmt.evaluate.metrics import Report, score_systems
from deepnmt.files import read_log
from deepnmt.model import overrides
from deepnmt.model.transformer import Transformer
from deepnmt.processes.process_group import count_gpus, processes, rank_from_environment
from deepnmt.processes.ranks import Ranks
from deepnmt.training.status import PREEMPTED, SIGNALS
from deepnmt.training.task import prepare as prepare_data
from deepnmt.training.trainer import train as train_run

__all__ = ["Hypothesis", "Recipe", "Run", "Scored", "UserError", "average", "load", "prepare", "read_recipe", "train"]

Settings = Mapping[str, Any]  # a recipe's settings by their dotted names, such as {"train.updates": 300}

log = logging.getLogger(__name__)

_training = threading.Lock()  # held by the run that trains in this process


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A trained model and what belongs to it; `load` and `train` make one.

    Attributes:
        folder: the run folder, or the checkpoint folder if that was loaded.
        checkpoint: the folder that the weights are from.
        recipe: the run's recipe, checked; its `translate` section is the search that `translate` makes.
        model: the Transformer, a `torch.nn.Module` in evaluation mode, weights in fp32.
        source_vocab: the source's vocabulary; `encode` makes token ids of a text, `decode` the text of ids.
        target_vocab: the target's.
        update: updates the model was trained for; of an average, those of its newest checkpoint.
    """

    folder: Path
    checkpoint: Path
    recipe: Recipe
    model: Transformer
    source_vocab: Vocabulary
    target_vocab: Vocabulary
    update: int

    @cached_property
    def parameters(self) -> int:
        """Trainable numbers of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        """Where the model is, and computes."""
        return self.model.output_weight.device

    def translate(
        self, sentences: Iterable[str], *, prefixes: Iterable[str] | None = None, seed: int | None = None,
        **settings: Any,
    ) -> list[str]:
        """Translates, as `deepnmt translate` does a file with a sentence a line.

        Args:
            sentences: texts, one sentence each. An empty one gives an empty one, one that is longer than the model
                allows is truncated with a warning.
            prefixes: what each translation begins with; without, nothing.
            seed: of sampling; without, the recipe's.
            settings: of the search, in place of those in the recipe's `translate` section: beam=5, method="greedy".

        Returns:
            The best translation of each sentence, in their order.

        Raises:
            UserError: an unknown or faulty setting; something other than a text among the sentences or prefixes, or not
                as many of these as of those.
        """
        hypotheses = self.translate_nbest(sentences, prefixes=prefixes, seed=seed, **settings)
        return [best[0].text for best in hypotheses]

    def translate_nbest(
        self, sentences: Iterable[str], *, prefixes: Iterable[str] | None = None, seed: int | None = None,
        **settings: Any,
    ) -> list[list[Hypothesis]]:
        """Translates, and says of every translation its score: `translate_nbest(texts, nbest=5, beam=5)`.

        Args and raises: see `translate`.

        Returns:
            For each sentence at most `nbest` hypotheses, best first. Each has text, score, log-probability, number of
            tokens, and whether it ended by itself.
        """
        recipe = self._searching(seed, settings)
        texts = _texts(sentences, "sentences")
        if prefixes is None:
            return self._translate(texts, recipe)
        lines, begins = list(texts), list(_texts(prefixes, "prefixes"))
        if len(begins) != len(lines):
            raise UserError(f"there are {len(begins)} prefixes of {len(lines)} sentences; give one of each, an empty "
                            "one where nothing is given")
        return self._translate(lines, recipe, prefixes=begins)

    def stream(
        self, sentences: Iterable[str], *, ahead: int = 1, seed: int | None = None, **settings: Any
    ) -> Iterator[str]:
        """Translates sentences as they come, from a generator, a socket or a person, in memory that does not grow.

        Args:
            sentences, seed, settings: see `translate`, which gives the same translations.
            ahead: how many sentences to take before they are translated, together. More is faster, but the first has
                to wait for the last of them.

        Returns:
            An iterator over the best translation of each sentence, in their order.

        Raises:
            UserError: see `translate`; or `ahead` is below 1.
        """
        _require_number(ahead, "ahead", 1)
        recipe = self._searching(seed, settings)
        texts = _texts(sentences, "sentences")

        def translations() -> Iterator[str]:
            start = 0
            while chunk := list(itertools.islice(texts, ahead)):
                for best in self._translate(chunk, recipe, start):
                    yield best[0].text
                start += ahead

        return translations()

    def _searching(self, seed: int | None, settings: Settings) -> Recipe:
        """The recipe with other settings of the search, and the seed that it draws with; None: its own."""
        changes = {f"translate.{name}": value for name, value in settings.items()}
        if seed is not None:
            changes["seed"] = seed
        return _changed(self.recipe, changes)

    def _translate(
        self, sentences: Iterable[str], recipe: Recipe, start: int = 0, prefixes: Iterable[str] | None = None
    ) -> list[list[Hypothesis]]:
        """`start`: sentences translated before these."""
        model, searcher = self._model_for(recipe)
        with _threads(recipe):
            return list(translate_shards(model, self.vocabs, sentences, recipe.translate, Ranks.alone(self.device),
                                         prefixes=prefixes, seed=recipe.seed, start=start, searcher=searcher))

    def score(
        self, sentences: Iterable[str], translations: Iterable[str], *, top: int = 0, **settings: Any
    ) -> list[Scored]:
        """Scores given translations, as `deepnmt score` does.

        Args:
            sentences: texts, one sentence each.
            translations: one of each, in their order.
            top: how many of the likeliest pieces to tell beside each piece of a translation.
            settings: in place of those in the recipe's `translate` section.

        Returns:
            For each translation its log-probability in nats, end of sentence included, and that of every piece.

        Raises:
            UserError: there are not as many translations as sentences, or see `translate`.
        """
        sources = list(_texts(sentences, "sentences"))
        targets = list(_texts(translations, "translations"))
        if len(sources) != len(targets):
            raise UserError(f"there are {len(targets)} translations of {len(sources)} sentences; give one of each")
        _require_number(top, "top", 0)
        recipe = self._searching(None, settings)
        half = recipe.translate.backend == "torch" and recipe.translate.precision == "bf16"
        model = self._packed("bf16") if half else self.model
        pairs = [(source, [Given(target)]) for source, target in zip(sources, targets, strict=True)]
        with _threads(recipe):
            scored = score_lines([model], self.vocabs, pairs, recipe.translate, pieces=True, top=top)
        return [line[0] for line in scored]

    @property
    def vocabs(self) -> tuple[Vocabulary, Vocabulary]:
        """Source and target."""
        return self.source_vocab, self.target_vocab

    def evaluate(self, tests: Sequence[str] | None = None, *, seed: int | None = None, **settings: Any) -> Report:
        """Translates test sets and scores them with SacreBLEU, as `deepnmt evaluate` does, but writes no file, and asks
        no metric of another program.

        Args:
            tests: names in the recipe's `data.test`, "NAME=SRC,REF" (two text files) or names of SacreBLEU's such as
                "wmt14/full"; without, all of `data.test`.
            seed, settings: see `translate`.

        Returns:
            A report of SacreBLEU's scores with their signatures; `report.table()` and `report.as_json()` show it.

        Raises:
            UserError: no such test set, or see `translate`.
        """
        if tests is not None:
            tests = list(_texts(tests, "tests"))
        sets = load_test_sets(self.recipe, tests)
        translations = [self.translate(test.sources, seed=seed, **settings) for test in sets]
        return score_systems({system_names([str(self.folder)])[0]: translations}, sets, self.recipe.data.trg_lang)

    def log(self) -> list[dict[str, Any]]:
        """The records of the run's `log.jsonl`: of type "train" (loss, learning_rate, ...), "valid" (loss, bleu, ...),
        "look" (source_gain, ...) and "event" (message), each with its `update`. Raises `UserError` if there is none."""
        return read_log(self.folder / "log.jsonl")

    def _model_for(self, recipe: Recipe) -> tuple[Transformer, Searcher | None]:
        """The model in the number format of a search, and the search of another program where that is asked for."""
        search = recipe.translate
        if search.backend == "torch":
            return self._packed(search.precision), None
        key = (search.backend, search.precision)
        if key not in self._searchers:
            self._searchers[key] = load_searcher(load_model(self.checkpoint), search, self.device)
        return self.model, self._searchers[key]

    def _packed(self, precision: str) -> Transformer:
        """A copy of the model for searches in fp32 or bf16, made anew when a weight has changed."""
        versions = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        if precision not in self._copies or self._copies[precision][0] != versions:
            if precision == "fp32":
                model = packed_copy(self.model)
            else:
                model = pack(cast_weights(copy.deepcopy(self.model), precision))
            self._copies[precision] = versions, model
        return self._copies[precision][1]

    @cached_property
    def _copies(self) -> dict[str, tuple[list[tuple[int, int]], Transformer]]:
        return {}

    @cached_property
    def _searchers(self) -> dict[tuple[str, str], Searcher]:
        return {}

    def __repr__(self) -> str:
        model = self.recipe.model
        blocks = "/".join(dict.fromkeys(model.block_names))  # one if both are the same
        return (f"Run({str(self.folder)!r}: {blocks} {model.encoder.layers}L-{model.decoder.layers}L, "
                f"{self.parameters:,} parameters, checkpoint {self.checkpoint.name} on {self.device})")


def load(
    folder: str | Path, checkpoint: str | Path | None = None, device: str | torch.device | None = None,
    plugins: Sequence[str | Path] = (),
) -> Run:
    """Loads a trained model.

    Args:
        folder: of a run, or a checkpoint.
        checkpoint: "best" (by validation), "newest", "averaged", or the folder of a checkpoint; without, the run's
            average if there is one, else its newest checkpoint.
        device: such as "cpu" or "cuda:1"; without, by the recipe's `parallel.device`: the first GPU, or the CPU.
        plugins: the files of the plug-ins that the model was trained with; without, no code of a plug-in is run.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it was trained with other plug-ins; or the device
            cannot be used, or a GPU that is there.
    """
    folder = _path(folder, "folder")
    place = None if device is None else _place(device)
    files = []
    for number, file in enumerate(_items(plugins, "plugins")):
        files.append(str(_path(file, f"plugins[{number}]")))
    faults = name_plugins({"plugins": files}, NAMED, True)
    if faults:
        raise UserError("\n".join(faults))
    if checkpoint is None:
        loaded = load_model(folder)
    elif isinstance(checkpoint, str) and checkpoint in ("best", "newest", "averaged"):
        loaded = load_model(folder, cast("Which", checkpoint))
    else:
        loaded = load_model(_path(checkpoint, "checkpoint"))
    if checkpoint is None:
        warn_if_outdated(loaded.folder)
    recipe = loaded.recipe
    if not (folder / MANIFEST).is_file():  # a run, whose recipe may have been changed since, and which may have moved
        recipe = load_recipe(folder)
    if place is None:
        place = torch.device("cuda" if count_gpus(recipe.parallel.device) else "cpu")
    model = loaded.model.to(place)
    return Run(folder, loaded.folder, recipe, model, loaded.src_vocab, loaded.trg_vocab, loaded.state.update)


def train(recipe: str | Path | Settings | Recipe, changes: Settings | None = None) -> Run:
    """Trains a recipe into its run folder, or resumes there, as `deepnmt train` does on one process.

    For several processes use the command under deepspeed, torchrun or srun, and `load` what it leaves. At SIGTERM,
    SIGUSR1, SIGHUP or SIGINT (Ctrl-C, a notebook's stop button) the run saves first, and then the signal has its usual
    effect; called again, training resumes. Outside the main thread signals are left alone. A process trains one run at
    a time: dropout draws from PyTorch's own generator, which no other thread may use meanwhile.

    Args:
        recipe, changes: see `read_recipe`.

    Returns:
        The run, with its newest checkpoint.

    Raises:
        UserError: the recipe is faulty, or not of translation, its data are not prepared, the run cannot begin or
            resume, or it diverges; or another thread trains.
        KeyboardInterrupt: training was interrupted, and has saved.
    """
    checked = read_recipe(recipe, changes)
    if checked.task != "translation":
        raise UserError("deepnmt.train returns a model that translates, but the task of this recipe is "
                        f"{checked.task}; train it with the command: deepnmt train RECIPE")
    run_training(checked)
    return load(Path(checked.run), "newest")  # whose plug-ins the recipe has named


def run_training(checked: Recipe) -> None:
    """What `train` does before it loads the model, for any task."""
    _, world, _, _ = rank_from_environment()
    if world > 1:
        raise UserError("deepnmt.train runs on one process, but a launcher has started several; train with the command "
                        "instead: torchrun -m deepnmt train RECIPE")
    group = checked.parallel.ds_config is not None
    with _alone(), _process_restored(), _threads(checked), processes(
            checked.parallel.threads, group=group, device=checked.parallel.device,
            wait=checked.parallel.start_timeout) as ranks:
        code = train_run(checked, ranks)
    if code == PREEMPTED:  # the handlers are those of before again
        status = json.loads((Path(checked.run) / "STATUS.json").read_bytes())
        signal.raise_signal(signal.Signals[status["signal"]])


def prepare(recipe: str | Path | Settings | Recipe, changes: Settings | None = None) -> Path:
    """Trains the vocabulary and writes the token arrays, as `deepnmt prepare` does; data that are up to date stay.

    Where `data.workers` is 0, one per core for the command, this encodes in the calling process: others would import
    a script anew, which only scripts with an `if __name__ == "__main__":` allow.

    Args:
        recipe, changes: see `read_recipe`.

    Returns:
        The folder, `data.folder`.

    Raises:
        UserError: a text is faulty, `vocab.size` does not suit it, the folder holds other data, ...
    """
    checked = read_recipe(recipe, changes)
    if getattr(checked.data, "workers", None) == 0:  # some tasks have no such setting
        checked = _changed(checked, {"data.workers": 1})
    return prepare_data(checked)


def average(
    run: str | Path | Run, *, last: int | None = None, best: int | None = None, updates: Sequence[int] | None = None,
    output: str | Path | None = None, device: str | torch.device | None = None,
) -> Run:
    """Averages the weights of checkpoints of a run into `averaged` in its folder, as `deepnmt average` does.

    Args:
        run: its folder, or the run.
        last, best, updates: at most one of these: the last n checkpoints, the n with the best validation, or those of
            certain updates; without, the last `average_last` of the recipe.
        output: a folder to write instead.
        device: see `load`.

    Returns:
        The run, with the average as its model.

    Raises:
        UserError: there are no such checkpoints.
    """
    folder = run.folder if isinstance(run, Run) else _path(run, "run")
    for name, count in (("last", last), ("best", best)):
        if count is not None:
            _require_number(count, name, 1)
    if updates is not None:
        updates = list(_items(updates, "updates"))
        for number, update in enumerate(updates):
            _require_number(update, f"updates[{number}]", 1)
    if output is not None:
        output = _path(output, "output")
    recipe = load_recipe(folder)
    averaged = average_run(recipe, last=last, best=best, updates=updates, output=output)
    return load(folder, averaged, device)


def read_recipe(recipe: str | Path | Settings | Recipe, changes: Settings | None = None) -> Recipe:
    """Reads and checks a recipe.

    Args:
        recipe: a YAML file, the folder of a run, the settings as nested mappings, or a recipe.
        changes: settings by their dotted names, in place of the recipe's: {"model.encoder.layers": 12}.

    Raises:
        UserError: with every fault, one a line.
    """
    if changes is None:
        changes = {}
    if not isinstance(changes, Mapping) or not all(isinstance(name, str) for name in changes):
        raise UserError(f"changes is {changes!r}, must be a mapping of settings, for example {{'train.updates': 300}}")
    if isinstance(recipe, (Mapping, Recipe)):
        return _changed(recipe, changes)
    settings = [_override(name, value) for name, value in changes.items()]
    return load_recipe(_path(recipe, "recipe"), settings)


def _changed(recipe: Settings | Recipe, changes: Settings) -> Recipe:
    """A recipe with other settings, checked."""
    if isinstance(recipe, Recipe):
        if not changes:
            return recipe
        tree = recipe.model_dump()
        # code that only a file names is not run
        named_plugins = "plugins" in changes
        named_metrics = any(name.split(".")[0] == "metrics" for name in changes)
    else:
        tree = copy.deepcopy(dict(recipe))
        named_plugins = named_metrics = True
    _json(tree, "the recipe")  # or it contains itself
    for name, value in changes.items():
        override(tree, _override(name, value))
    return check_recipe(tree, "the recipe", named_plugins, named_metrics)


def _override(name: str, value: Any) -> str:
    """A setting as on a command line."""
    return f"{name}={_json(value, name)}"


def _json(value: Any, name: str) -> str:
    """A setting, or a group of them, as JSON. What that cannot hold, such as a path, goes by its text."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is {value!r}, which is no tree of settings ({error})") from None


# -- arguments ---------------------------------------------------------------------------------------------------------


def _items(given: Any, name: str) -> Iterable[Any]:
    """The items of an argument. Raises `UserError` if it has none, or is a single string."""
    if isinstance(given, (str, bytes)):
        raise UserError(f"{name} is a single string, must be a list, such as [{given!r}]")
    if not isinstance(given, Iterable):
        raise UserError(f"{name} is {given!r}, must be a list")
    return given


def _texts(given: Any, name: str) -> Iterator[str]:
    """The texts of an argument; each is looked at when its turn has come. Raises `UserError`."""
    return (_text(text, f"{name}[{number}]") for number, text in enumerate(_items(given, name)))


def _text(given: Any, name: str) -> str:
    if not isinstance(given, str):
        raise UserError(f"{name} is {given!r}, must be a string")
    if not is_whole(given):
        raise UserError(f"{name} is {given!r}, which holds half of a character (a lone surrogate) and is no text; read "
                        "it again as UTF-8")
    return given


def _path(given: Any, name: str) -> Path:
    if not isinstance(given, (str, Path)):
        raise UserError(f"{name} is {given!r}, must be a path, as a string or a Path")
    try:
        Path(given).lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, or with characters that no path has
        raise UserError(f"{name} is {str(given)!r}, which is no path that can be read ({error})") from None
    return Path(given)


def _require_number(given: Any, name: str, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= sys.maxsize:
        raise UserError(f"{name} is {given!r}, must be a whole number, {least} or more")


def _place(given: Any) -> torch.device:
    """A device that can be used. Raises `UserError`."""
    try:
        place = torch.device(given)
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise UserError(f"device is {given!r}, which cannot be used ({cause}); give cpu, cuda or cuda:1, or leave it "
                        "out") from None
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"device is {given!r}, must be cpu, cuda or a GPU by its number, such as cuda:1")
    return place


# -- the process -------------------------------------------------------------------------------------------------------


@contextmanager
def _alone() -> Iterator[None]:
    """Refuses to train beside another run of this process, or in a process group that is not its own."""
    if not _training.acquire(blocking=False):
        raise UserError("another thread of this process is training, and both would draw their dropout from one "
                        "generator; wait until it has ended, or train in another process")
    try:
        if dist.is_initialized():
            raise UserError("torch.distributed is initialised in this process, and deepnmt.train opens and closes a "
                            "process group of its own; train in another process, or call destroy_process_group first")
        yield
    finally:
        _training.release()


@contextmanager
def _threads(recipe: Recipe) -> Iterator[None]:
    """As many threads as the command would take; at the end as many as before."""
    before = torch.get_num_threads()
    require_cores("parallel.threads", recipe.parallel.threads)
    torch.set_num_threads(recipe.parallel.threads or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _process_restored() -> Iterator[None]:
    """Puts back what training on one process changes of it: environment variables, signal handlers, and operations
    (`parallel.overrides`)."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        overrides.restore()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
