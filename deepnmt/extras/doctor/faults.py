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
from deepnmt.extras.doctor.probes import evaluating, hooks, layers_of, matrices, outputs_of, real_positions
from deepnmt.model.blocks import SIDES, SUBLAYERS, Side
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import BOS, PAD

_EQUAL = 1e-3  # of the outputs' size: what rounding may change
_FAINT = 0.2  # embeddings below this share of the positions' size are drowned; unscaled ones have 1.4 / sqrt(D)
_SPREAD = 4.0  # of the first logits; that of every block is below 2
_OWN = 0.9  # share of a sub-layer's own branch in its output; that of every block is below 0.6
_COLLAPSED = 1 - 1e-4  # mean cosine between a stack's outputs
_VARIES, _CONSTANT = 1e-3, 1e-6  # variance over the positions, over the mean square
_END = 10  # updates at the end of a trial


@torch.no_grad()
def wrong_wiring(model: Transformer, batch: Batch) -> list[str]:
    """Faults of the batch's labels, of the causal mask and of the masks of padding, in words."""
    src, lengths, trg_in, trg_out = (batch[name] for name in TRANSLATION)
    faults, vocab = [], model.table("trg").num_embeddings
    after = (trg_out != PAD)[:, 1:]
    if bool((trg_in[:, 0] != BOS).any()) or bool((trg_in[:, 1:] != trg_out[:, :-1])[after].any()):
        faults.append("labels: the decoder's input is not the target one position later, begun by bos")
    with evaluating(model):
        memory = model.encode(src, lengths, batch.key)
        hidden, half = model.decode(trg_in, memory, lengths, batch.key), trg_in.size(1) // 2
        other = trg_in.clone()
        other[:, half:] = (other[:, half:] + 1) % vocab
        if not _agree(model.decode(other, memory, lengths, batch.key)[:, :half], hidden[:, :half]):
            faults.append("causal mask: later target tokens change earlier outputs of the decoder")
        room = min(2, model.encoder.input.positions.size(0) - src.size(1))  # further columns of padding
        longer = F.pad(src, (0, room), value=PAD)
        padding = torch.arange(longer.size(1), device=src.device) >= lengths[:, None]
        real = real_positions(batch)["decoder"]
        moved = model.decode(trg_in, model.encode(longer.masked_fill(padding, PAD + 1), lengths, batch.key), lengths)
        if not _agree(moved[real], hidden[real]):
            faults.append("padding: what stands in the source's padding changes the decoder's outputs")
        room = min(2, model.decoder.input.positions.size(0) - trg_in.size(1))
        ends = {name: F.pad(batch[name], (0, room), value=PAD) for name in ("trg_in", "trg_out")}
        losses = [float(model(each).nll) for each in (batch, batch.with_tensors(**ends))]
        if not math.isclose(*losses, rel_tol=_EQUAL):
            faults.append("padding: the target's padding counts in the loss")
    return faults


def _agree(after: Tensor, before: Tensor) -> bool:
    return float((after - before).abs().max()) <= _EQUAL * float(before.square().mean().sqrt())


@torch.no_grad()
def wrong_sizes(
    model: Transformer, batch: Batch, dependency: Mapping[Side, Sequence[Sequence[float]]]
) -> list[str]:
    """Faults of initial weights, in words: embeddings, logits and branches of the wrong size.

    Args:
        dependency: β of both stacks, see `measures.dependency`.
    """
    faults, real = [], real_positions(batch)
    with evaluating(model):
        for side, table, ids in zip(SIDES, (model.table("src"), model.table("trg")),
                                    (batch["src"], batch["trg_in"]), strict=True):
            layer, embedded = model.get_submodule(f"{side}.input"), table(ids)
            places = layer(torch.zeros_like(embedded))
            sizes = [float(x[real[side]].square().mean().sqrt()) for x in (layer(embedded) - places, places)]
            if sizes[0] < _FAINT * sizes[1]:
                faults.append(f"embeddings: at the {side}'s input they have {sizes[0]:.2g} where the positions have "
                              f"{sizes[1]:.2g}, so the words are drowned; scale them by sqrt(width)")
        [hidden] = outputs_of(model, batch)["decoder"]
    spread = float(F.linear(hidden, model.output_weight).std(-1).median())
    if not spread < _SPREAD:
        faults.append(f"logits: before training they spread by {spread:.3g} over the vocabulary, not by about 1; the "
                      "embeddings or the decoder's outputs are too large")
    for side, rows in dependency.items():
        own = [row[-1] ** 2 for row in rows[1:]]
        if (large := sum(not share < _OWN for share in own)) > len(own) / 2:
            faults.append(f"branches: in {large} of {len(own)} sub-layers of the {side} the branch makes up more than "
                          f"{100 * _OWN:.0f} % of the output, so the residual stream is cut; the matrices are too "
                          "large")
    return faults


@torch.no_grad()
def wrong_outputs(model: Transformer, batch: Batch) -> list[str]:
    """Faults of a model that has trained, in words: stacks that have collapsed, or else dead branches."""
    real, dead = real_positions(batch), []
    outputs = outputs_of(model.eval(), batch)
    if collapsed := [side for side in SIDES if token_similarity(outputs[side][0]) > _COLLAPSED]:
        remedy = "; the rate is too high, or the warm-up too short for this depth and block"
        if collapsed == ["encoder"]:
            remedy = (", so there is no source to read; lower the encoder's learning rate alone, "
                      "'optimizer.lr_factors={encoder: 0.1}'")
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
    return [f"dead branch: {_some(dead)} put out the same, whatever comes in"] if dead else []


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
    broken = next((number for number, values in enumerate(zip(losses, norms, strict=True), 1)
                   if not all(map(math.isfinite, values))), None)
    if broken is not None:
        return [f"divergence: loss or gradient is not finite at update {broken} of the trial"]
    faults = []
    if (end := fmean(losses[-_END:])) > losses[0]:
        faults.append(f"rising loss: {losses[0]:.2f} nats at the first update of the trial, {end:.2f} over the last "
                      f"{min(_END, len(losses))}; the rate is too high, or the warm-up too short")
    moved = ((name, parameter - old) for (name, parameter), old in zip(model.named_parameters(), before, strict=True)
             if parameter.requires_grad and parameter.ndim == 2)  # no gradient: the recipe freezes it
    still = [name for pair in moved for name, rows in matrices([pair]) if not bool(rows.any())]
    return [*faults, *([f"frozen: {_some(still)} did not change in {len(losses)} updates"] if still else [])]


def _some(names: Sequence[str], shown: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
