"""The residual blocks by name; a file for each family.

    base        what a block is, the residual stream, norms
    post_norm   the sum of residual and branch is normed: Post-LN, Admin, DeepNorm, B2T, Keel
    pre_norm    the branch's input is normed: Pre-LN, Peri-LN, LayerNorm scaling, Sub-LN, Mix-LN
    norm_free   no norms: ReZero, Fixup, T-Fixup
    history     a layer reads the layers below: DLCL, Attention Residuals
    streams     several streams side by side: SiameseNorm, Hyper-Connections, mHC
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepnmt import config
from deepnmt.config.plugins import Table
from deepnmt.model.blocks.base import (
    NORMS,
    SIDES,
    SUBLAYERS,
    Block,
    Branch,
    Gate,
    LayerNorm,
    LayerPosition,
    Matrix,
    Norm,
    RMSNorm,
    Rule,
    Side,
    Stream,
    pack,
    set_clock,
    stream_of,
    tensors,
    unpack,
)
from deepnmt.model.blocks.history import DLCL, AttnRes, BlockAttnRes, DLCLPost, Mixture, MixtureTop
from deepnmt.model.blocks.norm_free import B2TNoLN, Fixup, ReZero, TFixup
from deepnmt.model.blocks.post_norm import (
    B2T,
    Admin,
    AdminClosedForm,
    DeepNorm,
    Keel,
    LooksLinear,
    PostLN,
    ReZeroPostLN,
)
from deepnmt.model.blocks.pre_norm import LNS, MixLN, PeriLN, PreLN, SubLN
from deepnmt.model.blocks.streams import Hyper, ManifoldHyper, Siamese

__all__ = [
    "B2T",
    "BLOCKS",
    "DLCL",
    "LNS",
    "NORMS",
    "SIDES",
    "SUBLAYERS",
    "Admin",
    "AdminClosedForm",
    "AttnRes",
    "B2TNoLN",
    "Block",
    "BlockAttnRes",
    "Branch",
    "DLCLPost",
    "DeepNorm",
    "Fixup",
    "Gate",
    "Hyper",
    "Keel",
    "LayerNorm",
    "LayerPosition",
    "LooksLinear",
    "ManifoldHyper",
    "Matrix",
    "MixLN",
    "Mixture",
    "MixtureTop",
    "Norm",
    "PeriLN",
    "PostLN",
    "PreLN",
    "RMSNorm",
    "ReZero",
    "ReZeroPostLN",
    "Rule",
    "Siamese",
    "Side",
    "Stream",
    "SubLN",
    "TFixup",
    "pack",
    "profiled_sublayers",
    "say_facts",
    "set_clock",
    "stream_of",
    "tensors",
    "unpack",
]


def _fault(block: Any) -> str | None:
    """What a plug-in's block must be, if it is not."""
    if not (isinstance(block, type) and issubclass(block, Block)):
        return f"is {block!r}, must be a subclass of deepnmt.model.blocks.Block"
    return "has profiled = True, which only admin may; set profiled = False in its class" if block.profiled else None


BLOCKS: Table[type[Block]] = Table("BLOCKS", {
    "post_ln": PostLN,
    "pre_ln": PreLN,
    "admin": Admin,
    "admin_closed_form": AdminClosedForm,
    "b2t": B2T,
    "b2t_no_ln": B2TNoLN,
    "deepnorm": DeepNorm,
    "rezero": ReZero,
    "rezero_post_ln": ReZeroPostLN,
    "fixup": Fixup,
    "t_fixup": TFixup,
    "looks_linear": LooksLinear,
    "dlcl": DLCL,
    "dlcl_post": DLCLPost,
    "peri_ln": PeriLN,
    "lns": LNS,
    "keel": Keel,
    "siamese": Siamese,
    "sub_ln": SubLN,
    "mix_ln": MixLN,
    "attn_res": AttnRes,
    "block_attn_res": BlockAttnRes,
    "hyper": Hyper,
    "mhc": ManifoldHyper,
}, _fault)


def say_facts(blocks: Mapping[str, type[Block]]) -> None:
    """Gives classes the facts of their rows in config/choices.py, which a plug-in's subclass then has, too."""
    for name, block in blocks.items():
        for fact in ("depth_scaled", "profiled", "growable", "fused_qkv"):
            setattr(block, fact, getattr(config.choices.BLOCKS[name], fact))


say_facts(BLOCKS)


def profiled_sublayers(model: config.Model, side: Side) -> list[str]:
    """The canonical names of a stack's sub-layers, in order; none if its block is not profiled."""
    if not model.stack(side).facts.profiled:
        return []
    layers = range(model.stack(side).layers)
    return [name for index in layers for name in LayerPosition.of(model, side, index).sublayers]
