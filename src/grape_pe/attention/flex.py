"""FlexAttention: the bias as a score_mod, the masks as a block mask. CUDA training, compiled CPU inference.

A score_mod is a function of one pair (t, j), which is all a slope or a table over distances needs. Coordinates are
passed as two float32 each, so that c_j - c_t keeps the digits of float64. A path is a sum over the tokens between
j and t, which no score_mod can compute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bias import Bias, DistanceBias, NoBias, ScoreBias, SlopeBias
from .masks import Masks
from .problem import as_two_floats
from .pruning import Prune

BLOCK = 128  # FlexAttention's own
#: how many shapes may be compiled: torch's own limit for one function with all its callers
SHAPES = 256


def why_not_flex(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if not isinstance(bias, (NoBias, SlopeBias, ScoreBias, DistanceBias)):
        return f"a score_mod is a function of one pair of tokens, and a {type(bias).__name__} is not"
    learns = any(x.requires_grad for x in (q, k, v, *bias.tensors().values()))
    if isinstance(bias, DistanceBias):
        if learns and torch.is_grad_enabled():
            return "gradients of a DistanceBias, whose table its score_mod reads, are not tested"
        if (reason := bias.why_not_resolved()) is not None:
            return reason
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention has no kernel for {q.device.type}"
    if q.dtype == torch.float64:
        return "FlexAttention has no float64 kernel"
    if q.device.type == "cpu" and learns:
        return "FlexAttention on the CPU has no backward pass, and refuses tensors that require gradients"
    if min(q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]) == 0:
        return "FlexAttention takes no empty tensors"
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled for each shape: for dynamic shapes torch 2.13 emits invalid C++.

    Past its limit of recompilations torch would run it uncompiled, which holds all logits at once.
    `fullgraph` makes that an error, and the limit is high.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:  # torch 2.12
        limit = torch._dynamo.config.patch(recompile_limit=SHAPES)
        return limit(torch.compile(flex_attention, dynamic=False, fullgraph=True))  # type: ignore[no-any-return]
    return torch.compile(  # type: ignore[call-overload]  # torch's overloads leave the limit out
        flex_attention, dynamic=False, fullgraph=True, recompile_limit=SHAPES, isolate_recompiles=True
    )


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, None]:
    from torch.nn.attention.flex_attention import create_block_mask

    score = _slopes(bias) if isinstance(bias, SlopeBias) else bias
    score = _distances(bias.resolved()) if isinstance(bias, DistanceBias) else score
    score_mod = _score_mod(score, q, k, masks.shift) if isinstance(score, ScoreBias) else None
    batch = q.shape[0] if masks.documents is not None or masks.key_padding is not None else None
    q, k, v = (_whole_blocks(x) for x in (q, k, v))
    options: dict[str, Any] = {"score_mod": score_mod, "scale": scale}
    if masks.causal or not masks.plain or k.shape[2] > masks.key_length:
        options["block_mask"] = create_block_mask(
            _visible(masks), batch, None, q.shape[2], k.shape[2], device=q.device
        )
    out: Tensor = _compiled()(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return out[:, :, : masks.query_length], None


def _whole_blocks(x: Tensor) -> Tensor:
    """(B, H, T, …) with T padded by zeros to whole blocks, on the CPU.

    torch's CPU kernel reads past the end of a last block of keys that is not whole: at 24 or 40 keys its
    result is wrong (torch 2.13). On CUDA it masks the rest itself.
    """
    if x.device.type != "cpu":
        return x
    missing = -x.shape[2] % BLOCK
    return F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing))


Index = Tensor  # a scalar index inside score_mod and mask_mod


def _visible(masks: Masks) -> Callable[[Index, Index, Index, Index], Tensor]:
    shift, window = masks.shift, masks.window
    documents, padding = (_padded_ids(x, masks) for x in (masks.documents, masks.key_padding))
    rows = 0 if documents is None else documents.shape[0]

    def mask_mod(b: Index, h: Index, row: Index, j: Index) -> Tensor:
        t = row + shift
        seen = j < masks.key_length
        if masks.causal:
            seen = seen & (j <= t)
        if window is not None:
            seen = seen & (((t - j < window) & (j - t < window)) | (j < masks.sinks))
        if documents is not None:
            own = b if rows > 1 else b * 0
            seen = seen & (documents[own, t] == documents[own, j])
        if padding is not None:
            seen = seen & ~padding[b, j]
        return seen

    return mask_mod


def _padded_ids(x: Tensor | None, masks: Masks) -> Tensor | None:
    """(B|1, Tk) long enough for every index a padded query or key may form."""
    if x is None or masks.device.type != "cpu":
        return x
    return F.pad(x, (0, BLOCK + -masks.key_length % BLOCK))


def _slopes(bias: SlopeBias) -> ScoreBias:
    """The same as a function of one pair, with coordinates as pairs of float32."""
    query: dict[str, Tensor] = {}
    key: dict[str, Tensor] = {}
    for r, term in enumerate(bias.terms):
        for side, c, rate in ((query, term.c_q, term.rate_q), (key, term.c_k, term.rate_k)):
            side[f"high{r}"], side[f"low{r}"] = as_two_floats(c)
            if rate is not None:
                side[f"rate{r}"] = rate.float()

    def function(t: Index, j: Index, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Tensor:
        total: Any = 0.0
        for r in range(len(bias.terms)):
            offset = (theirs[f"high{r}"] - mine[f"high{r}"]) + (theirs[f"low{r}"] - mine[f"low{r}"])
            rates = [side[f"rate{r}"] for side in (mine, theirs) if f"rate{r}" in side]
            total = total + sum(rates[1:], rates[0]) * offset
        return total  # type: ignore[no-any-return]

    return ScoreBias(function, query, key)


def _distances(bias: DistanceBias) -> ScoreBias:
    """The same as a function of one pair, which reads the table; heads are a number of the query."""
    table, length = bias.table[0, :, 0].float().contiguous(), bias.table.shape[-1]
    places = [x.round().long() for x in (bias.position_q, bias.position_k)]
    heads = torch.arange(table.shape[0], device=table.device).view(1, -1, 1)
    query = {"place": places[0] - bias.first, "head": heads.expand(-1, -1, places[0].shape[2])}
    if bias.weight is not None:
        query |= {f"mix{s}": x.float() for s, x in enumerate(bias.weight.unbind(-1))}

    def function(t: Index, j: Index, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Tensor:
        entry = mine["place"] - theirs["place"]
        near = entry.clamp(0, length - 1)
        total: Any = 0.0
        for s in range(table.shape[1]):
            total = total + mine.get(f"mix{s}", 1.0) * table[mine["head"], s, near]
        if bias.beyond != "last":
            total = torch.where(near == entry, total, 0.0 if bias.beyond == "zero" else float("-inf"))
        return total  # type: ignore[no-any-return]

    return ScoreBias(function, query, {"place": places[1]})


def _score_mod(bias: ScoreBias, q: Tensor, k: Tensor, shift: int) -> Callable[..., Tensor]:
    """The function of a `ScoreBias`, with the features of one pair."""
    sides = ((bias.query, q), (bias.key, k))
    query, key = (
        {name: _whole_blocks(x.expand(*q.shape[:2], of.shape[2])).contiguous() for name, x in side.items()}
        for side, of in sides
    )

    def score_mod(score: Tensor, b: Index, h: Index, row: Index, j: Index) -> Tensor:
        mine = {name: x[b, h, row] for name, x in query.items()}
        theirs = {name: x[b, h, j] for name, x in key.items()}
        return score + bias.function(row + shift, j, mine, theirs)

    return score_mod
