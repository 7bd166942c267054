"""Faults that an examination can name, each found by a direct test of the model or of its batch.

A test compares two computations that must agree, or a figure with a limit far from that of every block of deepnmt.
Which faults are found so, and which none of the tests can see: docs/guide/when_a_run_fails.md.

`B` sentences, `S` source and `T` target length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.extras.doctor.measures import token_similarity
from deepnmt.extras.doctor.probes import layers_of, matrices, outputs_of, real_positions
from deepnmt.model.blocks import SIDES, SUBLAYERS, Side
from deepnmt.model.dropout import evaluating
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import BOS, PAD

_EQUAL = 1e-3  # of the outputs' size: what rounding may change
_FAINT = 0.2  # embeddings below this share of the positions' size are drowned; unscaled ones have 1.4 / sqrt(D)
_SPREAD = 4.0  # of the first logits; that of every block is below 2
_OWN = 0.9  # share of a sub-layer's own branch in its output; that of every block is below 0.6
_COLLAPSED = 1 - 1e-4  # mean cosine between a stack's outputs
_VARIES, _CONSTANT = 1e-3, 1e-6  # variance over the positions, over the mean square
_END = 10  # updates at the end of a trial
_RISE = 0.1  # nats; a smaller one may be that of other sentences


@torch.no_grad()
def wrong_wiring(model: Transformer, batch: Batch) -> list[str]:
    """Faults of the batch's labels, of the causal mask and of the masks of padding, in words."""
    src, lengths, trg_in, trg_out = (batch[name] for name in TRANSLATION)
    faults = []
    vocab = model.table("trg").num_embeddings
    after = (trg_out != PAD)[:, 1:]
    if bool((trg_in[:, 0] != BOS).any()) or bool((trg_in[:, 1:] != trg_out[:, :-1])[after].any()):
        faults.append("labels: the decoder's input is not the target one position later, begun by bos")
    with evaluating(model):
        memory = model.encode(src, lengths, batch.key)
        hidden = model.decode(trg_in, memory, lengths, batch.key)
        half = trg_in.size(1) // 2
        altered = trg_in.clone()
        altered[:, half:] = (altered[:, half:] + 1) % vocab
        if not _agree(model.decode(altered, memory, lengths, batch.key)[:, :half], hidden[:, :half]):
            faults.append("causal mask: later target tokens change earlier outputs of the decoder")
        room = min(2, model.encoder.input.positions.size(0) - src.size(1))  # further columns of padding
        longer = F.pad(src, (0, room), value=PAD)
        padding = torch.arange(longer.size(1), device=src.device) >= lengths[:, None]
        real = real_positions(batch)["decoder"]
        memory = model.encode(longer.masked_fill(padding, PAD + 1), lengths, batch.key)
        moved = model.decode(trg_in, memory, lengths)
        if not _agree(moved[real], hidden[real]):
            faults.append("padding: what stands in the source's padding changes the decoder's outputs")
        room = min(2, model.decoder.input.positions.size(0) - trg_in.size(1))
        padded = batch.with_tensors(trg_in=F.pad(trg_in, (0, room), value=PAD),
                                    trg_out=F.pad(trg_out, (0, room), value=PAD))
        if not math.isclose(float(model(batch).nll), float(model(padded).nll), rel_tol=_EQUAL):
            faults.append("padding: the target's padding counts in the loss")
    return faults


def _agree(after: Tensor, before: Tensor) -> bool:
    return float((after - before).abs().max()) <= _EQUAL * _size(before)


def _size(x: Tensor) -> float:
    """The root mean square."""
    return float(x.square().mean().sqrt())


@torch.no_grad()
def wrong_sizes(
    model: Transformer, batch: Batch, dependency: Mapping[Side, Sequence[Sequence[float]]]
) -> list[str]:
    """Faults of initial weights, in words: embeddings, logits and branches of the wrong size.

    Args:
        dependency: β of both stacks, see `measures.dependency`.
    """
    faults = []
    real = real_positions(batch)
    with evaluating(model):
        inputs: dict[Side, Tensor] = {"encoder": model.table("src")(batch["src"]),
                                      "decoder": model.table("trg")(batch["trg_in"])}
        for side, embedded in inputs.items():
            layer = model.get_submodule(f"{side}.input")
            positions = layer(torch.zeros_like(embedded))
            words_size = _size((layer(embedded) - positions)[real[side]])
            positions_size = _size(positions[real[side]])
            if words_size < _FAINT * positions_size:
                faults.append(f"embeddings: at the {side}'s input words have {words_size:.2g} where the positions have "
                              f"{positions_size:.2g}, so they are drowned; scale the embeddings by sqrt(width)")
        [hidden] = outputs_of(model, batch)["decoder"]
    spread = float(F.linear(hidden, model.output_weight).std(-1).median())
    if not spread < _SPREAD:
        faults.append(f"logits: before training the logits spread by {spread:.3g} over the vocabulary, not by about 1; "
                      "the embeddings or the decoder's outputs are too large")
    for side, rows in dependency.items():
        shares = [row[-1] ** 2 for row in rows[1:]]
        large = [share for share in shares if not share < _OWN]  # also NaN
        if len(large) > len(shares) / 2:
            faults.append(f"branches: in {len(large)} of {len(shares)} sub-layers of the {side} the branch makes up "
                          f"more than {100 * _OWN:.0f} % of the output, so the residual stream is cut; the matrices "
                          "are too large")
    return faults


@torch.no_grad()
def wrong_outputs(model: Transformer, batch: Batch) -> list[str]:
    """Faults of a model that has trained, in words: stacks that have collapsed, or else dead branches."""
    real = real_positions(batch)
    dead: list[str] = []
    outputs = outputs_of(model.eval(), batch)
    collapsed = [side for side in SIDES if token_similarity(outputs[side][0]) > _COLLAPSED]
    if collapsed:
        remedy = "; the rate is too high, or the warm-up too short for this depth and block"
        if collapsed == ["encoder"]:
            remedy = (", so there is no source to read; lower the encoder's learning rate alone, for "
                      "a quarter of the updates: 'optimizer.lr_factors={encoder: 0.1}' and optimizer.lr_factors_until")
        return [f"collapse: the {' and the '.join(collapsed)} collapsed and put out nearly the same vector at every "
                f"position{remedy}"]

    def look(name: str, side: Side, inputs: Tensor, output: Tensor) -> None:
        if _variance(inputs[real[side]]) > _VARIES and _variance(output[real[side]]) < _CONSTANT:
            dead.append(name)

    with hooks() as handles:
        for side in SIDES:
            for number, layer in enumerate(layers_of(model, side)):
                for part in SUBLAYERS[side]:
                    handles.append(layer.get_submodule(part).register_forward_hook(
                        lambda _m, taken, output, name=f"{side}.layers.{number}.{part}", side=side:
                        look(name, side, taken[0], output)))
        outputs_of(model, batch)
    if dead:
        return [f"dead branch: {_some(dead)} put out the same, whatever comes in"]
    return []


def _variance(x: Tensor) -> float:
    """The variance over the positions of x [positions, D], over its mean square."""
    return float(x.var(0, correction=0).mean() / x.square().mean().clamp_min(1e-30))


@torch.no_grad()
def wrong_training(
    model: Transformer, before: Sequence[Tensor], losses: Sequence[float], norms: Sequence[float]
) -> list[str]:
    """Faults that a trial has shown, in words: a loss that rises, and matrices that did not move.

    Args:
        before: the parameters before the trial.
        losses, norms: of its updates.
    """
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return [f"divergence: loss or gradient is not finite at update {number} of the trial"]
    faults = []
    end = fmean(losses[-_END:])
    if end > losses[0] + _RISE:
        faults.append(f"rising loss: {losses[0]:.2f} nats at the first update of the trial, {end:.2f} over the last "
                      f"{min(_END, len(losses))}; the rate is too high, or the warm-up too short")
    unchanged = []
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        if parameter.requires_grad:  # otherwise the recipe freezes it
            for matrix, difference in matrices([(name, parameter - old)]):
                if not bool(difference.any()):
                    unchanged.append(matrix)
    if unchanged:
        faults.append(f"frozen: {_some(unchanged)} did not change in {len(losses)} updates")
    return faults


def _some(names: Sequence[str], shown: int = 4) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:shown])
    if len(names) > shown:
        text += f" and {len(names) - shown} more"
    return text
