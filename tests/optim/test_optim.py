"""Schedules computed by hand, the loss scale compared with fairseq's rule, optimizers, clipping."""

from __future__ import annotations

import math
import random
from itertools import islice
from typing import Literal, get_args

import pytest
import torch
from refusals import user_error
from tiny_engines import ROOT, batch_of, export_state, fairseq_rule

from deepnmt.batch import Batch
from deepnmt.config import Optimizer, Recipe, Schedule, check_recipe, with_settings
from deepnmt.data.batching import START, Position, Update
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from deepnmt.optim.optimizers import build_optimizer, moment_names
from deepnmt.optim.scaler import LossScaler
from deepnmt.optim.schedules import factors_risen, learning_rate, warmup_note
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import LocalEngine, clip_gradients, gradient_norm
from deepnmt.processes.ranks import Ranks
from deepnmt.training.state import TrainState
from deepnmt.training.updates import updates

Name = Literal["adam", "adamw", "radam", "radamw", "sgd"]


@pytest.mark.parametrize(("schedule", "rates"), [
    (Schedule(name="inverse_sqrt", warmup=100), {1: 0.01, 50: 0.5, 100: 1.0, 400: 0.5}),
    (Schedule(name="inverse_sqrt", warmup=0), {4: 0.5}),
    (Schedule(name="inverse_sqrt", warmup=100, start=0.2), {50: 0.6, 100: 1.0, 400: 0.5}),
    (Schedule(name="inverse_sqrt", warmup=100, start=0.2, count_from=0), {1: 0.2, 51: 0.6, 101: 1.0, 401: 0.5}),
    (Schedule(name="inverse_sqrt", warmup=0, count_from=0), {1: 1.0, 2: 1.0, 5: 0.5}),
    (Schedule(name="inverse_sqrt_decay", warmup=0, decay_period=30), {10: 0.75**0.5, 90: 0.5}),
    (Schedule(name="inverse_sqrt_decay", warmup=0, decay_period=30, count_from=0), {1: 1.0, 31: 0.5**0.5, 91: 0.5}),
    (Schedule(name="inverse_sqrt_decay", warmup=10, decay_period=30), {5: 0.5, 10: 1.0, 100: 0.5}),
    (Schedule(name="constant", warmup=10, start=0.2, count_from=0), {1: 0.2, 6: 0.6, 11: 1.0, 900: 1.0}),
    (Schedule(name="constant", warmup=10), {5: 0.5, 900: 1.0}),
    (Schedule(name="linear", warmup=100, final=0.1), {100: 1.0, 550: 0.55, 1000: 0.1}),
    (Schedule(name="cosine", warmup=100, final=0.1), {50: 0.5, 100: 1.0, 400: 0.775, 550: 0.55, 700: 0.325, 1000: 0.1}),
    (Schedule(name="wsd", warmup=10, decay=200, final=0.1), {5: 0.5, 800: 1.0, 900: 0.55, 1000: 0.1, 1001: 0.1}),
    (Schedule(name="wsd", warmup=0, decay=1000), {1: 0.999, 500: 0.5, 1000: 0.0}),
    (Schedule(name="step", warmup=10, step_update=100), {5: 0.5}),
    (Schedule(name="step", warmup=0, step_update=100), {99: 1.0, 100: 0.1}),
    (Schedule(name="step", warmup=0, step_update=100, step_factor=0.5), {400: 0.25}),
    (Schedule(name="step", warmup=0, step_update=100, after_step="constant"), {400: 0.1}),
    (Schedule(name="step", warmup=0, step_update=100, step_factor=1.0), {1: 1.0, 400: 0.5}),
], ids=str)
def test_learning_rate(schedule: Schedule, rates: dict[int, float]) -> None:
    found = {update: learning_rate(1.0, schedule, update, 1000) for update in rates}
    assert found == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize(("validations", "rate"), [
    ([], 1.0), ([3, 2, 2.5, 2.4], 0.5), ([3, 2, 2.5], 1.0), ([3, 2, 2.5, 1.9, 1.9], 1.0), ([3, 2, 2, 2, 2, 2], 0.25),
    ([3, 2, 2, 2, 1, 2, 2], 0.25), ([3, 2, 2, 2, 2], 0.5)])
def test_a_plateau_halves_the_rate_for_two_validations_without_a_new_best(validations: list[float], rate: float
                                                                          ) -> None:
    schedule = Schedule(name="plateau", warmup=4, patience=2, step_factor=0.5)
    assert learning_rate(1.0, schedule, 2, 1000, 0.0, validations) == 0.5  # in the warm-up
    assert learning_rate(1.0, schedule, 900, 1000, 0.0, validations) == rate


def test_an_update_takes_the_rate_that_the_validations_left() -> None:
    """A run that resumes has them in its state, so its rate is that of the unbroken run."""
    recipe = recipe_of({"lr": 1.0}, {"name": "plateau", "warmup": 0, "patience": 1})
    state = TrainState(update=5, validations=[{"update": 1, "value": 2.0}, {"update": 5, "value": 2.5}])

    class Batches:
        def update(self, *_: object) -> Update:
            return Update([micro_batch(1)], 4, 0.0, START)

    next(updates(engine_of({"lr": 1.0}), Batches(), recipe, state, Ranks.alone()))
    assert (state.update, state.interval.rate) == (6, pytest.approx(0.1))


def test_the_next_micro_batches_are_put_together_before_the_host_waits() -> None:
    """And each only once, in order."""
    happened: list[object] = []

    class Batches:
        def update(self, position: Position, *_: object) -> Update:
            happened.append(position.index)
            return Update([micro_batch(position.index)], 4, 0.0, Position(0, position.index + 1))

    engine = engine_of({"lr": 0.1})
    recipe, state = recipe_of({"lr": 0.1}), TrainState()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda tensor, _tolist=torch.Tensor.tolist: (
            happened.append("waits") if len(tensor) > 4 else None, _tolist(tensor))[1])
        for done in islice(updates(engine, Batches(), recipe, state, Ranks.alone()), 3):
            happened.append(done.number)
    assert happened == [0, 1, "waits", 1, 2, "waits", 2, 3, "waits", 3]
    assert state.position == Position(0, 3)


@pytest.mark.parametrize(("passes", "rate"), [(0.0, 1.0), (6.99, 1.0), (7.0, 0.1), (28.0, 0.05)])
def test_a_step_at_an_epoch_depends_on_the_epoch_alone(passes: float, rate: float) -> None:
    schedule = Schedule(name="step", warmup=0, step_epoch=8)
    for update in (1, 5000):  # however many updates the passes took
        assert learning_rate(1.0, schedule, update, 10, passes) == pytest.approx(rate, abs=1e-12)


def test_the_step_at_an_epoch_is_that_at_its_first_update() -> None:
    """With 50 updates an epoch, epoch 3 begins with update 101."""
    by_epoch = Schedule(name="step", warmup=10, step_epoch=3, step_factor=0.3)
    for update in range(1, 400):
        passes = (update - 1) / 50
        rate = min(update / 10, 1.0) if update < 101 else 0.3 * (100 / (update - 1)) ** 0.5
        assert learning_rate(2.0, by_epoch, update, 999, passes) == pytest.approx(2 * rate, rel=1e-12)


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "step"}, "schedule: name: step needs either step_epoch or step_update; 0 of them are given"),
    ({"name": "step", "step_epoch": 3, "step_update": 5000}, "needs either .* 2 of them are given"),
    ({"name": "constant", "step_epoch": 3}, r"step_epoch \(3\) needs name: step, but name is constant; remove step_e"),
    ({"name": "wsd", "warmup": 0}, "name: wsd needs decay, the updates in which the rate falls at the end"),
    ({"name": "plateau"}, "name: plateau needs patience, the validations in a row without a new best"),
    ({"name": "cosine", "decay": 5}, r"decay \(5\) needs name: wsd, but name is cosine; remove decay"),
    ({"name": "step", "step_update": 4000}, r"step_update \(4000\) must be above warmup \(4000\)"),
    ({"start": 1e-7, "warmup": 0}, r"start \(1e-07\) needs a warm-up, but warmup is 0; remove start"),
    ({"start": 0.5}, r"schedule.start \(0.5\) must not be above optimizer.lr \(0.0005\)"),
    ({"name": "linear", "warmup": 0, "count_from": 0}, r"count_from \(0\) needs name: inverse_sqrt, .* name is linear"),
    ({"name": "inverse_sqrt_decay"}, "name: inverse_sqrt_decay needs decay_period"),
    ({"decay_period": 30}, r"decay_period \(30\) needs name: inverse_sqrt_decay, but name is inverse_sqrt; remove"),
    ({"name": "step", "step_epoch": 1}, "schedule.step_epoch: is 1, must be greater than or equal to 2"),
])
def test_a_schedule_with_too_few_or_too_many_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of({}, settings)


def test_momentum_is_for_sgd_only() -> None:
    with pytest.raises(UserError, match=r"optimizer: momentum \(0.9\) needs name: sgd or muon, but name is adam"):
        recipe_of({"momentum": 0.9})


@pytest.mark.parametrize("seed", range(40))
def test_loss_scale_follows_fairseq(seed: int) -> None:
    draw = random.Random(seed)
    rate = draw.choice([0.0, 0.01, 0.3, 0.9])
    overflows = [draw.random() < rate for _ in range(800)]
    window = draw.choice([1, 4, 16, 256])
    scaler, trace = LossScaler(4.0, window, 0.03125), []
    for overflow in overflows:
        trace.append(scaler.cur_scale)
        scaler.update_scale(overflow)
        if not overflow:
            assert scaler.cur_scale == trace[-1], "a growth must wait until the optimizer has stepped"
        scaler.after_step()
        restored = LossScaler(1.0, window, 0.03125)
        restored.restore(scaler.state())
        scaler = restored  # a resume between any two updates changes nothing
    assert trace == fairseq_rule(overflows, 4.0, window, 0.03125)


@pytest.mark.parametrize(("script", "trace"), [  # x: overflow; window 3, from 2, floor 1/2
    ("......", [2, 2, 2, 4, 4, 4]),
    ("..x...", [2, 2, 2, 1, 1, 1]),
    ("..x....", [2, 2, 2, 1, 1, 1, 2]),
    ("xxxx....", [2, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1]),
    ("...x.x", [2, 2, 2, 4, 2, 2]),
])
def test_loss_scale_by_hand(script: str, trace: list[float]) -> None:
    scaler, seen = LossScaler(2.0, 3, 0.5), []
    for sign in script:
        seen.append(scaler.cur_scale)
        scaler.update_scale(sign == "x")
        scaler.after_step()
    assert seen == trace == fairseq_rule([sign == "x" for sign in script], 2.0, 3, 0.5)


def test_a_raised_floor_lifts_the_scale_that_was_stored() -> None:
    for stored, expected in ((0.03125, 2.0), (2.0, 2.0), (64.0, 64.0)):
        scaler = LossScaler(128.0, 256, 2.0)
        scaler.restore({"scale": stored, "clean": 7})
        assert scaler.state() == {"scale": expected, "clean": 7}


@pytest.mark.parametrize("name", get_args(Name))
def test_fused_updates_are_the_plain_ones(name: Name) -> None:
    recipe = recipe_of({"name": name, "lr": 1e-2, "weight_decay": 0.1, "decay_norms_and_biases": True,
                        "momentum": 0.9 if name == "sgd" else 0.0})
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
    plain, fused = (build_optimizer({"p": p}, recipe, fused) for p, fused in zip(parameters, (False, True)))
    for step in range(10):
        for parameter, optimizer in zip(parameters, (plain, fused)):
            parameter.grad = torch.sin(torch.arange(50.0) + step)
            optimizer.step()
    assert fused.defaults.get("fused", False) == (not name.startswith("radam"))
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=1e-6)


def test_a_warm_up_longer_than_the_run_causes_a_warning() -> None:
    assert warmup_note(recipe_of({"lr": 0.4}, {"warmup": 10})) is None
    assert warmup_note(recipe_of({"lr": 0.4}, {"warmup": 10, "count_from": 0})) is not None
    assert warmup_note(recipe_of({"lr": 0.4}, {"warmup": 40})) == (
        "schedule.warmup (40) ends after train.updates (10): the rate rises to 0.1 and "
        "never reaches optimizer.lr (0.4)")


def recipe_of(optimizer: dict[str, object], schedule: dict[str, object] | None = None) -> Recipe:
    """A small Admin model under an optimizer."""
    return check_recipe({
        "run": "unused", "schedule": schedule or {}, "optimizer": optimizer, "train": {"updates": 10},
        "data": {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": {"tsv": "x"}, "valid": {"tsv": "x"}},
        "model": {"width": 8, "heads": 2, "ffn": 12, "encoder": {"layers": 1}, "decoder": {"layers": 1}},
    }, "test")


def engine_of(optimizer: dict[str, object]) -> LocalEngine:
    recipe = recipe_of(optimizer)
    return LocalEngine(new_model(recipe.model, 20, 20, 1), recipe, torch.device("cpu"))


def micro_batch(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    src, trg = (torch.randint(4, 20, (2, 5), generator=draw) for _ in range(2))
    return batch_of(src, torch.tensor([5, 5]), trg, trg.roll(-1, dims=1), number)


@pytest.mark.parametrize("name", get_args(Name))
def test_decay_can_leave_out_norms_and_biases(name: Name) -> None:
    """On zero gradients only the decay moves a parameter, and only where it applies."""
    for everything in (True, False):
        engine = engine_of({"name": name, "lr": 0.5, "weight_decay": 0.1, "decay_norms_and_biases": everything})
        before = {key: parameter.detach().clone().fill_(0.5) for key, parameter in engine.module.named_parameters()}
        with torch.no_grad():
            for key, parameter in engine.module.named_parameters():
                parameter.copy_(before[key])
                parameter.grad = torch.zeros_like(parameter)
        for _ in range(8):  # RAdam's first five updates have another formula
            engine.optimizer.step()
        moved = {key for key, parameter in engine.module.named_parameters() if not torch.equal(parameter, before[key])}
        vectors = {key for key, tensor in before.items() if tensor.dim() == 1}
        assert {"encoder.layers.0.rule.norms.0.weight", "encoder.layers.0.rule.omegas.1",
                "decoder.layers.0.ffn.fc1.bias"} <= vectors
        assert moved == (set(before) if everything else set(before) - vectors)


def test_decoupled_decay_shrinks_the_weights_themselves() -> None:
    for name in ("radamw", "adamw", "sgd"):
        engine = engine_of({"name": name, "weight_decay": 0.2, "decay_norms_and_biases": True, "lr": 0.1})
        weight = engine.module.table("src").weight
        with torch.no_grad():
            weight.fill_(0.5)
        weight.grad = torch.zeros_like(weight)
        for _ in range(2):  # RAdam's first step is the same with the decay in the gradient
            engine.optimizer.step()
        torch.testing.assert_close(weight, torch.full_like(weight, 0.5 * (1 - 0.1 * 0.2) ** 2), rtol=1e-6, atol=0)


def test_adams_decay_is_in_the_gradient() -> None:
    """Of which the first step has the sign alone."""
    engine = engine_of({"name": "adam", "weight_decay": 0.2, "decay_norms_and_biases": True, "lr": 0.1})
    weight = engine.module.table("src").weight
    with torch.no_grad():
        weight.fill_(0.5)
    weight.grad = torch.zeros_like(weight)
    engine.optimizer.step()
    torch.testing.assert_close(weight, torch.full_like(weight, 0.4), rtol=1e-6, atol=0)


def test_factors_without_an_end_stay() -> None:
    assert factors_risen(Optimizer(lr_factors={"encoder": 0.2}), 10**6) == 0.0
    rising = Optimizer(lr_factors={"encoder": 0.2}, lr_factors_until=40)
    assert [factors_risen(rising, update) for update in (1, 40, 60, 80, 90)] == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("beta2", [0.98, 0.999, 0.9])
@pytest.mark.parametrize("unrectified", ["momentum", "skip"])
@pytest.mark.parametrize("name", ["radam", "radamw"])
def test_radam_by_hand(name: Name, unrectified: str, beta2: float) -> None:
    """Liu et al. 2020, On the Variance of the Adaptive Learning Rate and Beyond, algorithm 2, in float64. Where the
    variance has no rectification, either the moment is the step, or there is none and the decoupled decay is left."""
    recipe = recipe_of({"name": name, "lr": 0.1, "betas": [0.9, beta2], "eps": 1e-8, "unrectified": unrectified,
                        "weight_decay": 0.1, "decay_norms_and_biases": True})
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    optimizer = build_optimizer({"p": parameter}, recipe)
    weight, first, second = parameter.detach().clone(), torch.zeros(()), torch.zeros(())
    longest, skipped = 2 / (1 - beta2) - 1, []
    for step in range(1, 15):
        gradient = torch.sin(torch.arange(50.0, dtype=torch.float64) + step)
        parameter.grad = gradient.clone()
        rate = 0.1 / step
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = parameter.detach().clone()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate
        if name == "radamw":
            weight = weight * (1 - rate * 0.1)
        else:
            gradient = gradient + 0.1 * weight
        first, second = 0.9 * first + 0.1 * gradient, beta2 * second + (1 - beta2) * gradient**2
        mean, length = first / (1 - 0.9**step), longest - 2 * step * beta2**step / (1 - beta2**step)
        if length > 5:
            rectified = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            weight = weight - rate * rectified * mean * math.sqrt(1 - beta2**step) / (second.sqrt() + 1e-8)
        elif unrectified == "momentum":
            weight = weight - rate * mean
        else:
            skipped.append(step)
            assert name == "radamw" or torch.equal(parameter, before)
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=0)
    assert skipped == ([1, 2, 3, 4, 5] if unrectified == "skip" else [])


def test_muon_by_hand() -> None:
    """Matrices of layers: W (1 - rate decay) - rate 0.2 sqrt(max(A, B)) O, with O the nearest orthogonal matrix to the
    gradient with momentum, which five Newton-Schulz steps in 16 bits find to 30 %. The rest is AdamW's."""
    engine = engine_of({"name": "muon", "momentum": 0.9, "lr": 0.1, "weight_decay": 0.5, "decay_norms_and_biases": True,
                        "betas": [0.9, 0.99]})
    name, table = "encoder.layers.0.ffn.fc1.weight", "embeddings.shared.weight"  # 12 × 8
    parameters, buffer = dict(engine.module.named_parameters()), torch.zeros(12, 8)
    own = torch.nn.Parameter(parameters[table].detach().clone())
    adamw = torch.optim.AdamW([own], lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-9)
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        own.grad = parameters[table].grad.clone()
        before, gradient = parameters[name].detach().clone(), parameters[name].grad.clone()
        engine.optimizer.step()
        adamw.step()
        buffer = 0.9 * buffer + 0.1 * gradient
        left, _, right = torch.linalg.svd(0.1 * gradient + 0.9 * buffer, full_matrices=False)
        step = (before * (1 - 0.1 * 0.5) - parameters[name].detach()) / (0.1 * 0.2 * 12**0.5)
        found = left.T @ step @ right.T  # the identity, if the singular vectors stay and all values become 1
        torch.testing.assert_close(found, torch.eye(8), rtol=0, atol=0.35)
        assert 0.6 < float(found.diagonal().mean()) < 1.2
        assert float((found - found.diagonal().diag()).abs().max()) < 0.05
    torch.testing.assert_close(parameters[table], own)
    state = engine.optimizer.state[parameters[name]]
    torch.testing.assert_close(state["exp_avg"], buffer)
    assert not state["exp_avg_sq"].any() and float(state["step"]) == 3


def test_muon_is_refused_where_matrices_are_split() -> None:
    with user_error("name: muon needs momentum, such as 0.95"):
        recipe_of({"name": "muon"})
    recipe = with_settings(recipe_of({"name": "muon", "momentum": 0.95}), {
        "parallel.ds_config": str(ROOT / "ds_configs" / "zero1.json")})
    with user_error("optimizer.name is muon, which needs whole matrices, but .*zero1.json has ZeRO stage 1"):
        layout_of(recipe, 2)


def test_sgd_is_the_sum_of_gradients() -> None:
    """v <- 0.9 v + g + 0.01 w, w <- w - rate v, from v = 0 and from a v that was stored."""
    settings: dict[str, object] = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "decay_norms_and_biases": True}
    weights = {key: p.detach().clone() for key, p in engine_of(settings).module.named_parameters()}
    velocity = {key: torch.zeros_like(w) for key, w in weights.items()}
    engine, saved = engine_of(settings), dict[str, torch.Tensor]()
    for update in range(4):
        if update == 2:  # continue in another engine
            states = export_state(engine)
            saved = {k: v for state in states for k, v in state.moments.items()}
            engine = engine_of(settings)
            engine.fill({state.name: state.weight for state in states}.__getitem__, saved.__getitem__, 2)
        plain = engine_of(settings).module
        plain.load_state_dict(engine.module.state_dict())
        (plain(micro_batch(update)).loss / 10).backward()
        for key, parameter in plain.named_parameters():
            assert parameter.grad is not None
            velocity[key] = 0.9 * velocity[key] + parameter.grad + 0.01 * weights[key]
            weights[key] = weights[key] - 0.3 * velocity[key]
        assert engine.train_step([micro_batch(update)], 10, 0.3).applied
        for key, parameter in engine.module.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[key], rtol=1e-5, atol=1e-6)
    assert engine.optimizer_step == 4
    assert set(saved) == {f"{key}.momentum_buffer" for key in weights}


@pytest.mark.parametrize("settings", [
    {"name": "adam", "betas": [0.9999, 0.98]}, {"name": "radamw"}, {"name": "sgd"}, {"name": "muon", "momentum": 0.9}])
def test_a_rate_beyond_fp32_overflows_the_weights(settings: dict[str, object]) -> None:
    """So that the run ends as one that has diverged, where PyTorch alone would raise."""
    engine = engine_of({**settings, "lr_factors": {"encoder": 1e300}})
    applied = [engine.train_step([micro_batch(1)], 10, 1e300).applied for _ in range(12)]
    assert applied[0] and not applied[-1]


@pytest.mark.parametrize("name", ["adam", "radam", "sgd"])
def test_the_running_average_begins_with_the_initial_weights(name: Name) -> None:
    """Of an optimizer alone, which no engine has filled: average <- 0.7 average + 0.3 weights from the first step on,
    and not in a step without gradients, which an update is that was dropped."""
    recipe = with_settings(recipe_of({"name": name}), {"train.ema": 0.7})
    parameters = {"encoder.layers.0.ffn.fc1.weight": torch.nn.Parameter(torch.ones(4, 4))}
    weight, = parameters.values()
    optimizer, average = build_optimizer(parameters, recipe), weight.detach().clone()
    for update in range(4):
        weight.grad = None if update == 1 else torch.full((4, 4), 1.0 + update)
        optimizer.step()
        if weight.grad is not None:
            average = 0.7 * average + 0.3 * weight.detach()
        torch.testing.assert_close(optimizer.state[weight]["ema"], average)
    assert not torch.equal(average, torch.ones(4, 4))


@pytest.mark.parametrize(("settings", "kept"), [
    ({"name": "adam"}, ["exp_avg", "exp_avg_sq"]),
    ({"name": "radamw"}, ["exp_avg", "exp_avg_sq"]),
    ({"name": "sgd", "momentum": 0.5}, ["momentum_buffer"]),
    ({"name": "sgd"}, []),
])
def test_what_is_stored_is_what_pytorch_keeps(settings: dict[str, object], kept: list[str]) -> None:
    engine = engine_of(settings)
    fresh = [{key.removeprefix(f"{state.name}.") for key in state.moments} for state in export_state(engine)]
    engine.train_step([micro_batch(0)], 10, 0.1)
    for state, parameter in zip(export_state(engine), engine.module.parameters(), strict=True):
        held = {k: v for k, v in engine.optimizer.state[parameter].items() if k != "step" and v is not None}
        assert held.keys() == set(kept)
        assert state.moments.keys() == {f"{state.name}.{moment}" for moment in kept}
        assert all(torch.equal(state.moments[f"{state.name}.{moment}"], held[moment]) for moment in kept)
    assert fresh == [set(kept)] * len(fresh)
    assert list(moment_names(recipe_of(settings))) == kept


def clipped(parameters: list[torch.nn.Parameter], limit: float) -> float:
    """Clips gradients; returns their norm before."""
    norm = float(gradient_norm(parameters))
    clip_gradients(parameters, norm, limit)
    return norm


def test_clipping_by_the_norm_of_all_gradients() -> None:
    sizes = ((3000, 256), (7,), (), (2, 3, 4))
    draw = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (*sizes, (5,))]
    for p in parameters[:-1]:
        p.grad = 1e-3 * torch.randn(p.shape, generator=draw)
    before = [p.grad.clone() for p in parameters[:-1] if p.grad is not None]
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    assert clipped(parameters, 0.0) == pytest.approx(exact, rel=1e-7)
    assert clipped(parameters, exact * 1.1) == pytest.approx(exact, rel=1e-7)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=False) if p.grad is not None)
    assert clipped(parameters, exact / 1.01) == pytest.approx(exact, rel=1e-7)
    assert clipped(parameters, exact / 4) == pytest.approx(exact / 1.01, rel=1e-5)
    assert clipped(parameters, 0.0) == pytest.approx(exact / 4, rel=1e-5) and parameters[-1].grad is None
    for value in (math.nan, math.inf):
        parameters[-1].grad = torch.tensor([0.0, value] * 2 + [0.0])
        assert clipped(parameters, 1.0) == pytest.approx(value, nan_ok=True)
    assert clipped([], 1.0) == 0.0


def test_the_norm_is_exact_where_pytorchs_is_not() -> None:
    """A canary: once PyTorch's own norm on a CPU is exact, deepnmt can use it."""
    parameter = torch.nn.Parameter(torch.zeros(8000, 512))
    parameter.grad = torch.randn(8000, 512, generator=torch.Generator().manual_seed(1))
    exact = float(parameter.grad.double().norm())
    assert clipped([parameter], 0.0) == pytest.approx(exact, rel=1e-7)
    assert abs(float(torch.nn.utils.get_total_norm([parameter.grad])) / exact - 1) > 1e-5
