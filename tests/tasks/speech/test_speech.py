"""Speech: filter banks, lists and faulty audio, what is hidden, padding, every layout, resuming, recognition."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from refusals import Refused, user_error
from task_layouts import four_updates
from tiny_engines import parallel
from warm import Warm
from waves import RATE, wave_of

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import load_weights, newest_checkpoint
from deepnmt.cli import main
from deepnmt.config import check_recipe, load_recipe
from deepnmt.data.batching import START, plan_epoch
from deepnmt.evaluate.metrics import score_lines
from deepnmt.files import read_log
from deepnmt.model.init import fill
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.speech.audio import Utterance, features_of, read_lists, read_wave
from deepnmt.tasks.speech.data import SpeechStream, hide, padded_frames
from deepnmt.tasks.speech.filterbanks import BINS, filter_banks, normalised
from deepnmt.tasks.speech.model import build_of, initial_weights
from deepnmt.tasks.speech.prepare import PreparedSpeech
from deepnmt.tasks.speech.recognise import load_speech, recognise, recognise_list
from deepnmt.tasks.speech.settings import SHORTER, SpecAugment, SpeechRecipe
from deepnmt.tasks.speech.task import TASK

HERE = Path(__file__).parent
WORDS = {"do": 300, "re": 700, "mi": 1500, "fa": 3100}  # a word's tone in Hertz


def write_wave(file: Path, samples: npt.NDArray[np.floating], rate: int = RATE, channels: int = 1) -> None:
    with wave.open(str(file), "wb") as audio:
        audio.setnchannels(channels)
        audio.setsampwidth(2)
        audio.setframerate(rate)
        audio.writeframes((samples * 32767).astype("<i2").tobytes())


def sung(words: Sequence[str], seed: int) -> npt.NDArray[np.floating]:
    """A tone of 80 to 120 ms for each word and a pause, in noise."""
    draw = np.random.default_rng(seed)
    tones = []
    for word in words:
        time = np.arange(int(RATE * draw.uniform(0.08, 0.12))) / RATE
        tones += [np.sin(2 * np.pi * WORDS[word] * time), np.zeros(int(RATE * 0.04))]
    whole = np.concatenate(tones)
    return 0.5 * whole + 0.01 * draw.standard_normal(len(whole))


def make_list(folder: Path, name: str, count: int, seed: int) -> None:
    """A list of utterances of one to five words, and their files."""
    draw, lines = np.random.default_rng(seed), []
    for number in range(count):
        words = [str(word) for word in draw.choice(list(WORDS), draw.integers(1, 6))]
        write_wave(folder / f"{name}{number}.wav", sung(words, 1000 * seed + number))
        lines.append(f"{name}{number}.wav\t{' '.join(words)}\n")
    (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")


def tree(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "data": {"folder": str(folder / "data"), "train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"),
                 "test": {"held": str(folder / "valid.tsv")}, "max_frames": 80, "max_tokens": 20},
        "vocab": {"size": 16},
        "batch": {"tokens": 300, "accumulation": 1},
        "model": {"width": 16, "heads": 2, "ffn": 24, "max_length": 32, "dropout": 0.1, "channels": 12,
                  "encoder": {"layers": 2, "block": "pre_ln"}, "decoder": {"layers": 1, "block": "pre_ln"}},
        "optimizer": {"lr": 5e-3},
        "schedule": {"name": "constant", "warmup": 0},
        "train": {"updates": 8, "log_every": 1, "validate_every": 4, "save_every": 4, "valid_sentences": 5},
        "spec_augment": {"band_width": 10, "stretch_length": 8},
        "translate": {"beam": 2, "max_ratio": 0.5, "max_extra": 4},
        "parallel": {"ds_config": None, "threads": 1},
    }
    for name, settings in sections.items():
        own[name] = {**own.get(name, {}), **settings}
    return {"run": str(folder / "run"), "seed": 3, "task": "speech", "average_last": 1, **own}


def recipe_in(folder: Path, **sections: dict[str, Any]) -> SpeechRecipe:
    return cast(SpeechRecipe, check_recipe(tree(folder, **sections), "test"))


def write(folder: Path, name: str = "recipe.yaml", **sections: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(tree(folder, **sections)), encoding="utf-8")
    return str(folder / name)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    make_list(folder, "train", 40, 1)
    make_list(folder, "valid", 7, 2)
    PreparedSpeech.prepare(recipe_in(folder))
    return folder


# -- features ----------------------------------------------------------------------------------------------------------


def test_filter_banks_are_kaldis() -> None:
    """As kaldi-native-fbank 1.23.0 has them: 80 bins, 16 kHz, dither 0, else its defaults; recorded in kaldi_banks.npz,
    [20 waves, 3 frames, 80]."""
    theirs = np.load(HERE / "kaldi_banks.npz")["banks"]
    ours = np.stack([filter_banks(wave_of(number), RATE) for number in range(20)])
    assert theirs.shape == (20, 3, BINS) and theirs.std() > 2
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


def test_filter_banks_are_those_of_the_installed_kaldi() -> None:
    knf = pytest.importorskip("kaldi_native_fbank", reason="pip install kaldi-native-fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither, options.mel_opts.num_bins = 0.0, BINS
    for number in range(20):
        samples = wave_of(number, 0.3)
        bank = knf.OnlineFbank(options)
        bank.accept_waveform(RATE, (samples * 2**15).tolist())
        bank.input_finished()
        theirs = np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])
        ours, sure = filter_banks(samples, RATE), theirs > theirs.max(1, keepdims=True) - 16  # Kaldi's FFT is fp32
        assert ours.shape == theirs.shape and sure.mean() > 0.7
        np.testing.assert_allclose(ours[sure], theirs[sure], rtol=0, atol=1e-3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02)


def test_features_are_normalised_per_utterance() -> None:
    features = normalised(filter_banks(wave_of(2, 1.0), RATE))
    np.testing.assert_allclose(features.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(features.std(0), 1, atol=1e-4)
    assert not normalised(np.full((5, BINS), 3, np.float32)).any()
    assert len(filter_banks(np.zeros(399), RATE)) == 0 and len(filter_banks(np.zeros(400), RATE)) == 1


def test_wav_flac_and_ready_features_are_the_same(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="pip install 'deepnmt[speech]'")
    samples = wave_of(3, 0.5)
    write_wave(tmp_path / "a.wav", samples)
    whole = (samples * 32767).astype("<i2")
    soundfile.write(tmp_path / "a.flac", whole, RATE, subtype="PCM_16")
    soundfile.write(tmp_path / "b.wav", whole.astype(np.float32) / 2**15, RATE, subtype="FLOAT")
    np.save(tmp_path / "a.npy", filter_banks(whole.astype(np.float32) / 2**15, RATE))
    found = [features_of(Utterance("here", tmp_path / name, ""), RATE, 100)
             for name in ("a.wav", "a.flac", "b.wav", "a.npy")]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_what_is_hidden_depends_on_seed_epoch_and_utterance_alone() -> None:
    frames, settings = np.ones((60, BINS), np.float32), SpecAugment()
    first = [hide(frames, settings, *key) for key in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert np.array_equal(first[0], first[1])
    assert len({each.tobytes() for each in first}) == 4 and frames.all()
    shares = []
    for number in range(300):
        kept = hide(frames, settings, 4, 0, number) != 0
        hidden_bins, hidden_frames = ~kept.any(0), ~kept.any(1)
        assert (kept == ~(hidden_bins[None] | hidden_frames[:, None])).all() or not kept.any()
        if kept.any():
            assert hidden_bins.sum() <= 54
            shares.append(hidden_bins.mean())
    assert abs(np.mean(shares) - (1 - (1 - 13.5 / 80) ** 2)) < 0.03
    short = SpecAugment(bands=0, stretches=1, stretch_share=0.1)
    assert all((hide(frames, short, 4, 0, n) == 0).all(1).sum() <= 6 for n in range(100))


# -- the model ---------------------------------------------------------------------------------------------------------


def test_padding_changes_no_output(prepared: Path) -> None:
    """Of an utterance alone and beside longer ones: the memory, the loss, and what is recognised."""
    recipe = recipe_in(prepared, model={"dropout": 0.0})
    data = PreparedSpeech.open(recipe)
    model = build_of(recipe, data.vocab.size)(lambda part: None).eval()
    fill(model, initial_weights(recipe, data.vocab.size))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.detach().uniform_(-1, 1, generator=torch.Generator().manual_seed(5))  # which padding would let through
    utterances = data.utterances("train")
    rows = [int(row) for row in np.argsort(utterances.src_lengths)[[0, 1, 20, -1]]]
    assert utterances.src_lengths is utterances.src_lengths, "which is asked for in every micro-batch"
    together = utterances.batch(rows, 0, torch.device("cpu"))
    with torch.no_grad():
        memory = model.encode(together["src"], together["src_lengths"])
        sums = 0.0
        for place, row in enumerate(rows):
            alone = utterances.batch([row], 0, torch.device("cpu"))
            length = int(alone["src_lengths"][0])
            expected = model.encode(alone["src"], alone["src_lengths"])[0]
            torch.testing.assert_close(memory[place, :length], expected, rtol=1e-5, atol=1e-5)
            sums += float(model(alone).loss)
        assert abs(float(model(together).loss) - sums) < 1e-4 * sums
    features = [utterances.features(row) for row in rows]
    apart = [recognise(model, data.vocab, [each], recipe.translate)[0][0] for each in features]
    for one, other in zip(recognise(model, data.vocab, features, recipe.translate), apart, strict=True):
        assert one[0].text == other.text and abs(one[0].log_prob - other.log_prob) < 1e-4
    assert memory.size(1) * SHORTER == together["src"].size(1)


def test_convolutions_follow_their_formula(prepared: Path) -> None:
    recipe = recipe_in(prepared)
    model = build_of(recipe, 16)(lambda part: None)
    fill(model, initial_weights(recipe, 16))
    frames, positions = padded_frames([np.random.default_rng(0).standard_normal((9, BINS)).astype(np.float32)])
    assert frames.shape == (1, 12, BINS) and positions.tolist() == [3] and not frames[0, 9:].any()
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters() if name.startswith("convolutions")}
    x = frames[0].astype(np.float64)
    for part in ("first", "second"):
        weight, bias = w[f"convolutions.{part}.weight"], w[f"convolutions.{part}.bias"]
        around = np.pad(x, ((2, 2), (0, 0)))
        y = np.stack([np.einsum("ock,kc->o", weight, around[2 * t:2 * t + 5]) + bias for t in range(len(x) // 2)])
        a, b = np.split(y, 2, axis=1)
        x = a / (1 + np.exp(-b))
    found = model.embed(torch.from_numpy(frames), torch.from_numpy(positions))
    np.testing.assert_allclose(found[0].detach().numpy(), x, rtol=1e-4, atol=1e-5)
    assert set(w) == {f"convolutions.{part}.{kind}" for part in ("first", "second") for kind in ("weight", "bias")}
    bound = (80 * 5) ** -0.5
    assert 0.95 * bound < abs(w["convolutions.first.weight"]).max() <= bound


def test_batches_hold_as_many_frames_as_the_recipe_says(prepared: Path) -> None:
    recipe = recipe_in(prepared)
    data = PreparedSpeech.open(recipe)
    stream, utterances = TASK.stream(recipe, data), data.utterances("train")
    plan = plan_epoch(utterances.src_lengths, utterances.trg_lengths, 300, recipe.seed, 0)
    batches = [stream.batch(0, index, torch.device("cpu")) for index in range(stream.epoch_size(0))]
    assert len(batches) == len(plan) > 3 and sum(len(batch["src"]) for batch in batches) == 40
    assert max(batch["src"].size(0) * batch["src"].size(1) for batch in batches) <= 300
    assert sum(batch.tokens for batch in batches) == int(utterances.trg_lengths.sum())
    stream = TASK.stream(recipe_in(prepared, batch={"update_tokens": 60}), data)
    shares = [stream.update(START, 1, rank, 2, torch.device("cpu")) for rank in range(2)]
    assert sum(batch.tokens for share in shares for batch in share.batches) == shares[0].tokens == shares[1].tokens
    assert 40 < shares[0].tokens < 80 and len(shares[0].batches) == len(shares[1].batches) == 4


def test_training_hides_other_parts_in_every_epoch(prepared: Path) -> None:
    recipe, cpu = recipe_in(prepared), torch.device("cpu")
    data = PreparedSpeech.open(recipe)
    stream = TASK.stream(recipe, data)
    utterances, rows = stream.sentences(0, 0)
    later, _ = stream.sentences(1, 0)
    whole = utterances.batch(rows, 0, cpu)["src"]
    one, two = (stream.collate(sentences, rows, 0, cpu)["src"] for sentences in (utterances, later))
    for hidden in (one, two):
        left = hidden != 0
        assert (whole[~left] != 0).any() and torch.equal(hidden[left], whole[left])
    assert not torch.equal(one, two)


def test_every_layout_takes_the_same_updates(prepared: Path, warm: Warm) -> None:
    alone, = four_updates(warm, 1, prepared, [tree(prepared, batch={"accumulation": 2})])
    layouts = ["zero1_fp32", "zero3_fp32"]
    both = four_updates(warm, 2, prepared, [tree(prepared, parallel=parallel(layout, threads=1)) for layout in layouts])
    for layout, found in zip(layouts, both, strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6, err_msg=layout)
    assert alone[0] > alone[3] > 0


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_resumes_to_the_bit(prepared: Path) -> None:
    """Stopped in the middle of an epoch and run again, it is as if it had never stopped."""
    whole, broken = prepared / "whole", prepared / "broken"
    file = write(prepared)
    assert main("train", [file, f"run={whole}"]) == 0
    for ends in (5, 8):
        assert main("train", [file, f"run={broken}", f"train.updates={ends}"]) == 0
    ours, theirs = (load_weights(cast(Path, newest_checkpoint(run / "checkpoints"))) for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(ours) == len(theirs) > 20
    logged = [[line["loss"] for line in read_log(run / "log.jsonl") if line["type"] == "train"]
              for run in (broken, whole)]
    assert logged[0] == logged[1] and len(logged[1]) == 8
    first, last = (line for line in read_log(whole / "log.jsonl") if line["type"] == "valid")
    assert last["loss"] < first["loss"] and last["wer"] > 0


def killed(file: str, run: str) -> int:
    """Runs in a process of its own: kills it while it makes the micro-batch of update 7, once there is a checkpoint."""
    collate, made = SpeechStream.collate, 0

    def until(*arguments: Any) -> Batch:
        nonlocal made
        made += 1
        if made == 7:
            while newest_checkpoint(Path(run) / "checkpoints") is None:  # written in the background
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return collate(*arguments)

    SpeechStream.collate = until  # type: ignore[method-assign]
    return main("train", [file, f"run={run}"])


def test_a_killed_run_resumes_to_the_bit(prepared: Path, warm: Warm) -> None:
    whole, broken = prepared / "whole", prepared / "killed"
    file = write(prepared)
    warm.start(1, "test_speech:killed", file, broken)
    assert warm.wait() == [-signal.SIGKILL]
    assert cast(Path, newest_checkpoint(broken / "checkpoints")).name == "update-00000004"
    for run in (broken, whole):
        assert main("train", [file, f"run={run}"]) == 0
    ours, theirs = (load_weights(cast(Path, newest_checkpoint(run / "checkpoints"))) for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(ours) == len(theirs) > 20


def test_tones_are_learned_and_recognised(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average of checkpoints hears most tones of unseen utterances, from a list and as a test set; in the same way
    if few utterances are held in memory at a time."""
    run = tmp_path / "run"
    make_list(prepared, "many", 400, 5)
    file = write(prepared, "longer.yaml", train={"updates": 300, "log_every": 100, "validate_every": 150,
                                                 "save_every": 20, "label_smoothing": 0.0},
                 data={"train": str(prepared / "many.tsv"), "folder": str(prepared / "data_of_many")},
                 vocab={"size": 21}, batch={"tokens": 1200},
                 model={"width": 32, "ffn": 64, "channels": 32, "dropout": 0.0,
                        "encoder": {"layers": 1, "block": "pre_ln"}, "decoder": {"layers": 1, "block": "pre_ln"}},
                 spec_augment={"bands": 1, "band_width": 4, "stretches": 0})
    assert main("prepare", [file]) == main("train", [file, f"run={run}"]) == 0
    assert main("average", [str(run), "--last", "2"]) == 0
    recognise_list(run, str(prepared / "valid.tsv"), str(tmp_path / "out.txt"), load_recipe(file).translate)
    texts = [utterance.text for utterance in read_lists([str(prepared / "valid.tsv")], "list")]
    found = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    scores = score_lines(found, [texts], "", metrics=["wer", "cer"])
    assert scores.values["wer"] < 25, (found, texts)
    assert load_speech(run)[3] == run / "averaged"
    capsys.readouterr()
    assert main("evaluate", [str(run)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"WER \(lower is better\) +held\nrun +[\d.]+", said) and "CER|nrefs:1|case:mixed|version:" in said
    kept = json.loads((run / "scores.json").read_text())
    assert kept["wer"] == pytest.approx(scores.values["wer"]) and kept["checkpoint"].endswith("averaged")
    assert (run / "scores" / "held.hyp").read_text(encoding="utf-8").splitlines() == found
    assert main("evaluate", [str(run), "--test", "held", "translate.beam=1"]) == 0
    assert json.loads((run / "scores.json").read_text()) == kept and (run / "scores-beam_1-held" / "held.hyp").exists()
    assert main("evaluate", [str(run), "data.test.none=none.tsv", "--test", "held", "--test", "none"]) == 2
    assert "there is no list none.tsv" in capsys.readouterr().err
    write_wave(prepared / "long.wav", wave_of(1, 1.5))
    (prepared / "long.tsv").write_text("long.wav\n", encoding="utf-8")
    assert main("translate", [str(run), "--input", str(prepared / "long.tsv")]) == 2
    assert "148 frames of 10 ms, but 4 times the model's max_length is 128; cut it" in capsys.readouterr().err
    held: list[int] = []
    monkeypatch.setattr("deepnmt.tasks.speech.recognise.CHUNK", 3)
    monkeypatch.setattr("deepnmt.tasks.speech.recognise.recognise",
                        lambda *all, **more: (held.append(len(all[2])), recognise(*all, **more))[1])
    again = ["translate", [str(run), "--input", str(prepared / "valid.tsv"), "--output", str(tmp_path / "again")]]
    assert main(*again) == 0 and (tmp_path / "again").read_bytes() == (tmp_path / "out.txt").read_bytes()
    assert held == [3, 3, 1]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def faulty(folder: Path, line: str) -> str:
    """A recipe whose training list has a good line and then this one."""
    write_wave(folder / "good.wav", sung(["do", "re"], 1))
    (folder / "train.tsv").write_text(f"good.wav\tdo re\n{line}\n", encoding="utf-8")
    (folder / "valid.tsv").write_text("good.wav\tdo re\n", encoding="utf-8")
    return write(folder)


@pytest.mark.parametrize("line, expected", [
    ("a.wav\t", "train.tsv, line 2 (a.wav): the transcript is empty"),
    ("a.wav", "train.tsv, line 2 (a.wav): the transcript is empty"),
    ("\tdo", "train.tsv, line 2: there is no file"),
    ("none.wav\tdo", "train.tsv, line 2 (none.wav): there is no file {folder}/none.wav; correct the path"),
    ("rate.wav\tdo", "train.tsv, line 2 (rate.wav): the audio has 8,000 samples a second, but data.sample_rate is 16"),
    ("cut.wav\tdo", "train.tsv, line 2 (cut.wav): the audio is truncated"),
    ("stereo.wav\tdo", "train.tsv, line 2 (stereo.wav): the audio has 2 channels"),
    ("short.wav\tdo", "train.tsv, line 2 (short.wav): the audio is shorter than a frame"),
    ("long.wav\tdo", "train.tsv, line 2 (long.wav): the audio has 98 frames of 10 ms, but data.max_frames is 80"),
    ("good.wav\t" + "do re " * 15, "train.tsv, line 2 (good.wav): the transcript has"),
    ("bad.npy\tdo", "train.tsv, line 2 (bad.npy): the array has shape [5, 40] of float32, must be [frames, 80]"),
    ("nan.npy\tdo", "train.tsv, line 2 (nan.npy): the array holds what is no number"),
    ("text.npy\tdo", "train.tsv, line 2 (text.npy): the array cannot be read"),
    ("zip.npy\tdo", "train.tsv, line 2 (zip.npy): the array cannot be read"),
    ("many.npy\tdo", "train.tsv, line 2 (many.npy): the file holds several arrays"),
    ("huge.npy\tdo", "train.tsv, line 2 (huge.npy): the array holds what is no number in fp32"),
    ("head.wav\tdo", "train.tsv, line 2 (head.wav): the audio is truncated"),
    ("less.wav\tdo", "train.tsv, line 2 (less.wav): the audio is truncated"),
])
def test_faulty_utterances(line: str, expected: str, tmp_path: Path, refused: Refused) -> None:
    """A sentence with list, line and file, and no folder."""
    file = faulty(tmp_path, line)
    write_wave(tmp_path / "rate.wav", wave_of(1, 0.3)[::2], 8000)
    write_wave(tmp_path / "stereo.wav", wave_of(1, 0.3), channels=2)
    write_wave(tmp_path / "short.wav", wave_of(1, 0.02))
    write_wave(tmp_path / "long.wav", wave_of(1, 1.0))
    (tmp_path / "cut.wav").write_bytes((tmp_path / "long.wav").read_bytes()[:9000])
    np.save(tmp_path / "bad.npy", np.zeros((5, 40), np.float32))
    np.save(tmp_path / "nan.npy", np.full((5, BINS), np.nan, np.float32))
    (tmp_path / "text.npy").write_text("no array", encoding="utf-8")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04")
    with open(tmp_path / "many.npy", "wb") as several:
        np.savez(several, one=np.zeros((5, BINS)), two=np.zeros((5, BINS)))
    np.save(tmp_path / "huge.npy", np.full((5, BINS), 1e300))
    (tmp_path / "head.wav").write_bytes(b"RIFF\0")
    whole = (tmp_path / "good.wav").read_bytes()  # cut, where the size of the file is right and that of samples is not
    (tmp_path / "less.wav").write_bytes(whole[:4] + (2993).to_bytes(4, "little") + whole[8:3001])
    said = refused("prepare", file, "vocab.size=12")
    assert expected.replace("{folder}", str(tmp_path)) in said and not (tmp_path / "data").exists()


@pytest.mark.parametrize(("riff", "size"), [(2**32 - 1, 2**32 - 1), (0, 0), (0x7FFFF024, 0x7FFFF000)])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_a_wav_from_a_pipe(riff: int, size: int, subtype: str, tmp_path: Path) -> None:
    """Its samples are those up to the end of the file. Where the header has their size, fewer are a truncated file."""
    utterance = Utterance("pipe.wav", tmp_path / "pipe.wav", "do")
    write_wave(utterance.file, wave_of(1, 0.3))
    expected = read_wave(utterance, RATE)
    if subtype == "FLOAT":
        soundfile = pytest.importorskip("soundfile", reason="pip install 'deepnmt[speech]'")
        soundfile.write(utterance.file, expected, RATE, subtype=subtype)
    head, _, rest = utterance.file.read_bytes().partition(b"data")
    head = head[:4] + riff.to_bytes(4, "little") + head[8:] + b"LIST\x05\0\0\0INFO \0data"  # an odd size is padded
    utterance.file.write_bytes(head + size.to_bytes(4, "little") + rest[4:])
    assert np.array_equal(read_wave(utterance, RATE), expected)
    utterance.file.write_bytes(head + rest[:-2])
    with user_error("the audio is truncated"):
        read_wave(utterance, RATE)


def test_a_file_that_the_disk_does_not_give() -> None:
    with user_error(r"^list.tsv, line 3: the audio cannot be read \(Input/output error\); give it again"):
        read_wave(Utterance("list.tsv, line 3", Path("/proc/self/mem"), "do"), RATE)


def test_a_truncated_flac(tmp_path: Path, refused: Refused) -> None:
    soundfile = pytest.importorskip("soundfile", reason="pip install 'deepnmt[speech]'")
    file = faulty(tmp_path, "cut.flac\tdo")
    soundfile.write(tmp_path / "whole.flac", wave_of(2, 0.7), RATE)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "whole.flac").read_bytes()[:12_000])
    assert re.search(r"line 2 \(cut.flac\): the audio .*truncated", refused("prepare", file, "vocab.size=12"))
    piped = bytearray((tmp_path / "whole.flac").read_bytes())
    piped[21] &= 0xF0  # 36 bits: how many samples there are; 0: unknown
    piped[22:26] = bytes(4)
    (tmp_path / "cut.flac").write_bytes(piped)
    assert "line 2 (cut.flac): the header does not say how long" in refused("prepare", file, "vocab.size=12")
    (tmp_path / "cut.flac").write_text("no audio", encoding="utf-8")
    assert "line 2 (cut.flac): the audio cannot be read" in refused("prepare", file, "vocab.size=12")
    file = faulty(tmp_path, "nan.wav\tdo")
    soundfile.write(tmp_path / "nan.wav", np.full(8000, np.nan), RATE, subtype="FLOAT")
    assert "line 2 (nan.wav): the audio holds what is no number" in refused("prepare", file, "vocab.size=12")


def test_a_transcript_with_separators_is_one_line(tmp_path: Path) -> None:
    """Else the validation would compare what it hears with the transcripts of other utterances."""
    make_list(tmp_path, "train", 40, 1)
    make_list(tmp_path, "valid", 3, 2)
    first, *others = (tmp_path / "valid.tsv").read_text(encoding="utf-8").splitlines()
    texts = [first.partition("\t")[2] + "\u2028do\x85re", *(line.partition("\t")[2] for line in others)]
    (tmp_path / "valid.tsv").write_text("".join(f"valid{n}.wav\t{text}\n" for n, text in enumerate(texts)), "utf-8")
    recipe = recipe_in(tmp_path)
    PreparedSpeech.prepare(recipe)
    assert PreparedSpeech.open(recipe).texts() == texts


@pytest.mark.parametrize("changes, expected", [
    (["parallel.pipeline_stages=2", "parallel.ds_config=ds_configs/zero1.json"], "parallel.pipeline_stages (2) is not"),
    (["batch.tokens=60"], "batch.tokens (60) must not be below data.max_frames (80)"),
    (["batch.tokens=81", "data.max_frames=81"], "not be below data.max_frames (81), rounded up to a multiple of 4"),
    (["batch.tokens=80", "data.max_tokens=80", "model.max_length=99"],
     "batch.tokens (80) must be above data.max_tokens (80), to hold the longest transcript and eos"),
    (["model.max_length=16"], "data.max_frames (80) must not be above 4 times model.max_length (16)"),
    (["data.max_tokens=32"], "data.max_tokens (32) must be below model.max_length (32)"),
    (["model.encoder.block=admin"], "encoder.block (admin) needs a profile"),
    (["model.kernel=4"], "kernel (4) must be odd"),
    (["train.freeze=[convolution]"], "did you mean convolutions?"),
    (["translate.method=mbr"], "translate.method (mbr) chooses among translations of text alone"),
    (["translate.choose=mbr", "translate.candidates=2"], "translate.choose (mbr) chooses among translations of text"),
    (["vocab.shared=false"], "vocab.shared: false and vocab.tags are of translation"),
    (["vocab.tags=[<x>]"], "vocab.shared: false and vocab.tags are of translation"),
    (["train.r_drop=1", "model.dropout=0"], "train.r_drop (1) has no effect because"),
    (["admin.profile=omega.json"], "admin.profile (omega.json) needs block: admin"),
    (["metrics={comet: {command: 'x {hyp}'}}"], "metrics has no effect with task: speech"),
])
def test_settings_that_are_refused(changes: list[str], expected: str, prepared: Path, refused: Refused) -> None:
    assert expected in refused("train", write(prepared), "--dry-run", *changes)


def test_a_test_set_is_named_once(prepared: Path, refused: Refused) -> None:
    twice = ("--test", "held") * 2
    assert "two of the test sets held, held have the same name" in refused("evaluate", write(prepared), *twice)


def test_prepared_data_is_compared(prepared: Path, refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    assert "data.max_frames 80, but the recipe has 79" in refused("train", write(prepared), "data.max_frames=79")
    assert "--part is 1/2" in refused("prepare", write(prepared), "--part", "1/2")
    assert "there is no prepared data in" in refused("train", write(prepared), "data.folder=nowhere")
    assert main("prepare", [write(prepared)]) == 0
    capsys.readouterr()
    assert main("train", [write(prepared), "--dry-run"]) == 0
    assert "300 at most" in capsys.readouterr().out


def test_other_audio_is_not_up_to_date(tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """It may go, though, once it is prepared."""
    make_list(tmp_path, "train", 40, 1)
    make_list(tmp_path, "valid", 3, 2)
    file, audio = write(tmp_path), tmp_path / "valid1.wav"
    assert main("prepare", [file]) == 0
    size = sum(wav.stat().st_size for wav in tmp_path.glob("valid*.wav"))
    write_wave(audio, wave_of(1, 0.8))
    said = refused("prepare", file)
    assert f"but had {size:,} when {tmp_path / 'data'} was prepared" in said and "audio of data.valid" in said
    audio.unlink()
    capsys.readouterr()
    assert main("prepare", [file]) == 0 and "is up to date" in capsys.readouterr().err


def test_a_dry_run_has_the_size_of_the_given_vocabulary(prepared: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """And prepared data that is not there yet may have an empty folder."""
    said = []
    for vocab in (["vocab.size=16"], [f"vocab.model={prepared / 'data'}", "vocab.size=8000"]):
        assert main("train", [write(prepared), "--dry-run", f"data.folder={tmp_path}", *vocab]) == 0
        said.append(re.findall("# parameters +(.*)", capsys.readouterr().out))
    assert said[0] == said[1] != []


RECIPES = sorted((HERE.parents[2] / "recipes" / "librispeech").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_are_the_papers(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B2T, Table 7: 32 GPUs x 40,000 frames, and T-Md's sizes. Each line has a comment."""
    text = file.read_text(encoding="utf-8")
    assert all("# " in line for line in text.splitlines() if line.strip())
    recipe = cast(SpeechRecipe, load_recipe(file))
    [gpus, accumulation, tokens, whole] = map(int, re.findall(r"\d+", text.partition("# Batch: ")[2])[:4])
    assert (accumulation, tokens) == (recipe.batch.accumulation, recipe.batch.tokens)
    assert gpus * accumulation * tokens == whole == 32 * 40_000
    assert (recipe.train.updates, recipe.optimizer.lr, recipe.schedule.warmup) == (150_000, 1e-3, 4000)
    assert (recipe.vocab.size, recipe.vocab.kind, recipe.average_last) == (10_000, "unigram", 10)
    assert file.stem == f"{recipe.model.encoder.layers}l-{recipe.model.decoder.layers}l"
    assert main("train", [str(file), "--dry-run", f"data.folder={tmp_path}/none"]) == 0
    said = capsys.readouterr().out
    parameters = int(said.partition("# parameters")[2].split()[0].replace(",", ""))
    assert 50e6 < parameters < 75e6 and "not prepared yet" in said


def test_there_are_both_recipes() -> None:
    assert [file.stem for file in RECIPES] == ["12l-6l", "6l-6l"]
    assert Ranks.alone().world == 1
