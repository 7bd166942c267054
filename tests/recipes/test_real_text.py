"""Real text: time, memory and padding of preparing and planning it, and Admin's profile against the published curve.

Each measurement runs in a new process, because peak memory is recorded for the whole life of a process. Time is CPU
time, including the processes that encode, so that other work on the machine does not count.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPORA = Path(os.environ.get("DEEPNMT_CORPORA", "/nonexistent"))
MIB = 2**20
WORKERS = 2
SAMPLE = 20_000  # sentences for a vocabulary; with the default of 2 million, memory would grow with these texts
MULTI30K = {name: {side: str(CORPORA / "multi30k" / f"{stem}.{tag}.gz") for side, tag in (("src", "de"), ("trg", "en"))}
            for name, stem in (("train", "train"), ("valid", "val"))}
TATOEBA = {"tsv": str(CORPORA / "tatoeba" / "deu-eng.2018-05.tsv.gz"), "columns": [2, 1]}
EUROPARL = {"src": str(CORPORA / "europarl20k" / "train.de.gz"), "trg": str(CORPORA / "europarl20k" / "train.en.gz")}

corpora = pytest.mark.skipif(
    not all(map(os.path.exists, [*MULTI30K["train"].values(), *MULTI30K["valid"].values(), TATOEBA["tsv"]])),
    reason="reads Multi30k and Tatoeba; export DEEPNMT_CORPORA=FOLDER with multi30k/ and tatoeba/ runs it")
long = pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="half a minute; DEEPNMT_LONG=1 runs it")
europarl = pytest.mark.skipif(not os.path.exists(EUROPARL["src"]),
                              reason="reads Europarl; export DEEPNMT_CORPORA=FOLDER with europarl20k/ runs it")
deep = pytest.mark.skipif(os.environ.get("DEEPNMT_DEEP") != "1", reason="minutes; DEEPNMT_DEEP=1 runs it")


def measured(job: str, *arguments: object) -> dict[str, Any]:
    """Calls a function of this file in a new process, and returns its result."""
    done = subprocess.run([sys.executable, __file__, job, *map(str, arguments)], capture_output=True, text=True,
                          check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def used() -> dict[str, float]:
    """CPU seconds, and peak memory in bytes: of this process, and of all (counting each worker as the largest one)."""
    mine, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    own = 1024 * int(status.partition("VmHWM:")[2].split()[0])  # ru_maxrss includes the process that started this one
    return {"seconds": mine.ru_utime + mine.ru_stime + others.ru_utime + others.ru_stime,
            "own": own, "all": own + WORKERS * 1024 * others.ru_maxrss}


def tree(folder: str, name: str, train: dict[str, Any]) -> dict[str, Any]:
    """A recipe's settings, to prepare the training text `train` into `folder/name`."""
    return {"run": f"{folder}/run", "train": {"updates": 1}, "vocab": {"size": 8000, "max_sentences": SAMPLE},
            "data": {"folder": f"{folder}/{name}", "src_lang": "de", "trg_lang": "en", "workers": WORKERS,
                     "train": train, "valid": MULTI30K["valid"]}}


def prepare_both(folder: str) -> dict[str, Any]:
    """Multi30k, then Tatoeba, which has six times as many pairs."""
    from deepnmt.config import check_recipe
    from deepnmt.data.prepare import prepare

    measurements: dict[str, Any] = {"before": used()}
    for name, train in (("multi30k", MULTI30K["train"]), ("tatoeba", TATOEBA)):
        prepare(check_recipe(tree(folder, name, train), name))
        measurements[name] = used()
    return measurements


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("corpora")
    return folder, measured("prepare_both", folder)


@corpora
def test_tatoeba_is_prepared_within_a_minute_and_a_gibibyte(both: tuple[Path, dict[str, Any]]) -> None:
    folder, measurements = both
    manifest = json.loads((folder / "tatoeba" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["splits"]["train"]["read"] == 169_813
    assert measurements["tatoeba"]["seconds"] - measurements["multi30k"]["seconds"] < 60
    assert measurements["tatoeba"]["all"] < 1024 * MIB


@corpora
def test_memory_hardly_grows_with_the_text(both: tuple[Path, dict[str, Any]]) -> None:
    """With six times as many pairs; each needs a hash to detect duplicates, and other small numbers."""
    _, measurements = both
    assert measurements["tatoeba"]["own"] < measurements["multi30k"]["own"] + 32 * MIB


@corpora
@pytest.mark.parametrize("tokens", [4096, 2048])
def test_at_most_a_tenth_of_a_batch_is_padding(both: tuple[Path, dict[str, Any]], tokens: int) -> None:
    from deepnmt.data.batching import plan_epoch
    from deepnmt.data.prepared import PreparedData

    train = PreparedData.open(both[0] / "multi30k").split("train")
    for epoch in range(3):
        assert plan_epoch(train.src_lengths, train.trg_lengths, tokens, 1, epoch).waste <= 0.10


def plan(pairs: str) -> dict[str, Any]:
    """Plans an epoch of sentences with lengths like those of text."""
    from deepnmt.data.batching import plan_epoch

    generator = np.random.default_rng(1)
    src = np.clip(generator.gamma(3.0, 9.0, int(pairs)), 1, 250).astype(np.int32)
    trg = np.clip(src * generator.normal(1.0, 0.15, int(pairs)), 1, 250).astype(np.int32)
    before = used()
    epoch = plan_epoch(src, trg, 4096, 1, 0)
    return {"waste": epoch.waste, "seconds": used()["seconds"] - before["seconds"], "own": used()["own"]}


@long
def test_five_million_pairs_are_planned_within_ten_seconds_and_two_gibibytes() -> None:
    result = measured("plan", 5_000_000)
    assert result["seconds"] < 10 and result["own"] < 2048 * MIB and result["waste"] < 0.05


@europarl
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("encoder", "decoder"), [pytest.param(3, 2, marks=long), pytest.param(100, 100, marks=deep)])
def test_the_profile_follows_the_published_curve(encoder: int, decoder: int, tmp_path: Path) -> None:
    """At width 512 and the authors' dropout. ω of a sub-layer does not depend on the layers above it."""
    from deepnmt.config import check_recipe
    from deepnmt.data.prepare import prepare
    from deepnmt.model.admin_profile import AdminProfile
    from deepnmt.processes.process_group import processes
    from deepnmt.training.profile import profile
    from studies.admin_profile import differences, published

    settings = tree(str(tmp_path), "europarl", EUROPARL)
    settings["data"]["valid"] = EUROPARL
    settings["model"] = {"encoder": {"layers": encoder}, "decoder": {"layers": decoder},  # d 512, 8 heads, FFN 2,048
                         "attention_dropout": 0.1, "activation_dropout": 0.1}
    recipe = check_recipe(settings, "profile")
    prepare(recipe)
    with processes(1) as ranks:
        omega = AdminProfile.load(profile(recipe, ranks), recipe.model)
    for side, values in (("encoder", omega.encoder), ("decoder", omega.decoder)):
        percent = differences(values, published()[side])
        assert len(percent) == len(values) and max(map(abs, percent)) <= 3
        assert abs(sum(percent)) / len(percent) <= 1.5


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
