"""`attend`: one call for attention with any bias and any mask; `attend.explain`: how it would do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..bias import NO_BIAS, Bias, NoBias, SlopeBias, SlopeTerm
from .blockwise import attend_blockwise, why_not_blockwise
from .cpu import build as native
from .flex import attend_flex, why_not_flex
from .lifted import attend_lifted, why_not_lifted
from .masks import Masks, documents_from_lengths
from .pruning import Prune, as_number
from .reference import attend_reference
from .rows import attend_rows, why_not_rows
from .surroundings import without_autocast
from .tile_op import kernel_for

#: logits below which the plain torch kernels spend more on calls than on arithmetic
SMALL = 1 << 18
#: of document ids; torch computes little with the others
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

Attend = Callable[[Tensor, Tensor, Tensor, Bias, Masks, float, Prune], Tensor]
WhyNot = Callable[[Tensor, Tensor, Tensor, Bias, Masks], str | None]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, and what it cannot do (None: it can)."""

    attend: Attend
    why_not: WhyNot


@dataclass(frozen=True)
class Explanation:
    """Which implementation `attend` would take, why, and why not the others."""

    impl: str
    why: str
    why_not: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {reason}" for name, reason in self.why_not.items())
        return f"{self.impl}: {self.why}{others}"


def _reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> Tensor:
    return attend_reference(q, k, v, bias, masks, scale)


def _triton(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune) -> Tensor:
    from .triton.api import attend_triton

    return attend_triton(q, k, v, bias, masks, scale, prune)


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    from .triton.api import why_not_triton

    return why_not_triton(q, k, v, bias, masks)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(_reference, lambda *_: None),
    "lifted": Implementation(attend_lifted, why_not_lifted),
    "blockwise": Implementation(attend_blockwise, why_not_blockwise),
    "rows": Implementation(attend_rows, why_not_rows),
    "flex": Implementation(attend_flex, why_not_flex),
    "triton": Implementation(_triton, _why_not_triton),
}


#: whose kernels are custom operators or torch's own, with reverse-mode gradients only
FUSED = ("lifted", "blockwise", "rows", "flex", "triton")


@dataclass(frozen=True)
class Call:
    """One call of `attend`, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    masks: Masks
    scale: float
    prune: Prune

    @property
    def logits(self) -> int:
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2]

    @property
    def learns(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def pushes_forward(self) -> bool:
        """Whether a forward-mode derivative is under way, which only plain torch operations have."""
        tensors = (self.q, self.k, self.v, *self.bias.views().values(), *self.bias.traces().values())
        return not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors)

    def why_not(self, name: str) -> str | None:
        if name in FUSED and self.pushes_forward:
            return "its kernels have no forward-mode derivative"
        return IMPLEMENTATIONS[name].why_not(self.q, self.k, self.v, self.bias, self.masks)

    def run(self, name: str) -> Tensor:
        attend = IMPLEMENTATIONS[name].attend
        with without_autocast(self.q):
            return attend(self.q, self.k, self.v, self.bias, self.masks, self.scale, self.prune)


def _preference(call: Call) -> tuple[list[str], str]:
    """What `auto` tries, best first, and the reason for that order."""
    if call.pushes_forward:
        return ["reference"], "a forward-mode derivative, which the fused kernels do not have"
    device = call.q.device.type
    plain = isinstance(call.bias, NoBias) and call.masks.plain
    if device == "cpu" and torch.compiler.is_compiling():  # which cannot ask for a C++ compiler
        return (["lifted"] if plain else []) + ["blockwise"], "what torch.compile can follow"
    if plain and device == "cpu" and call.learns and kernel_for(call.q) == "compiled":
        return ["blockwise"], "the compiled tiles: forward and backward a little ahead of torch's own"
    if plain:
        return ["lifted", "triton", "rows", "blockwise"], "no bias: torch's own attention, as it is"
    if device == "cpu" and kernel_for(call.q) != "compiled" and call.logits <= SMALL:
        return ["reference"], "so small that the dense computation is the quickest"
    if call.why_not("rows") is None and device != "cuda":
        why = "a few queries and no gradients: the bias is a row or two, and torch's attention takes it"
        return ["rows"], why
    if device == "cuda":
        why = "on CUDA the fused kernel, then torch's flash attention, then FlexAttention"
        return ["triton", "lifted", "flex", "blockwise"], why
    if device == "cpu" and kernel_for(call.q) == "compiled":
        return ["blockwise"], "on CPU the compiled tile kernel, which skips tiles that cannot matter"
    reason = f"no kernel of ours for {device}"
    if device == "cpu":
        reason = native.why_not() or f"no compiled kernel for {call.q.dtype}"
    return ["lifted", "blockwise"], f"{reason}: torch's attention where the bias fits it, else by blocks"


class _Attend:
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Bias | None = None,
        causal: bool = True,
        window: int | None = None,
        documents: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        key_padding: Tensor | None = None,
        sinks: int = 0,
        scale: float | None = None,
        prune: Prune = "auto",
        key_bound: Tensor | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """softmax(scale * q k^T + bias) v over the keys each query may see.

        Args:
            q: queries (B, H, Tq, D). k, v: keys (B, Hkv, Tk, D) and values (B, Hkv, Tk, Dv), with H a
                multiple of Hkv. When Tq < Tk the last query stands at the last key.
            bias: what `Encoding` returned, or a sum of such; None for zero. Never scaled.
            causal: a token sees itself and what came before.
            window: a token sees fewer than `window` tokens away, itself included.
            documents: (Tk,) or (B, Tk) integer ids of packed sequences; a token sees only its own.
            cu_seqlens: the same as cumulative lengths (0, n1, n1 + n2, …, Tk), for every row of the batch.
            key_padding: (B, Tk) bool, True where the key is padding.
            sinks: so many first keys stay visible whatever the window.
            scale: 1/sqrt(D) by default.
            prune: skip tiles of keys that cannot change the result: "auto" (below rounding), None (never),
                or a distance in nats below a row's maximum.
            key_bound: (B, Hkv), an upper bound of |k| if one is known: decoding then skips keys unread.
            impl: which implementation; "auto" chooses. A named one never falls back to another.

        Returns:
            (B, H, Tq, Dv) in v's dtype. A query that sees no key gets zeros.
        """
        _check_shapes(q, k, v)
        masks = _masks(q, k, causal, window, documents, cu_seqlens, key_padding, sinks, key_bound)
        call = _checked(q, k, v, bias, masks, scale, prune)
        return call.run(_choose(call, impl))

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Bias | None = None,
        scale: float | None = None,
        prune: Prune = "auto",
        impl: str = "auto",
        causal: bool = True,
        **masking: Any,
    ) -> Explanation:
        """Which implementation the same call of `attend` would take, and why; nothing is computed."""
        _check_shapes(q, k, v)
        call = _checked(q, k, v, bias, _masks(q, k, causal, **masking), scale, prune)
        chosen = _choose(call, impl)
        why = _preference(call)[1] if impl == "auto" else "asked for by name"
        refusals = {name: call.why_not(name) for name in IMPLEMENTATIONS if name != chosen}
        return Explanation(
            chosen, why, {name: reason or "less preferred here" for name, reason in refusals.items()}
        )


attend = _Attend()


def _choose(call: Call, impl: str) -> str:
    if impl == "auto":
        return next(name for name in _preference(call)[0] if call.why_not(name) is None)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(['auto', *IMPLEMENTATIONS])}; got {impl!r}")
    reason = call.why_not(impl)
    if reason is not None:
        able = ", ".join(name for name in IMPLEMENTATIONS if call.why_not(name) is None)
        raise ValueError(f"impl={impl!r} cannot do this: {reason}; these can: {able}")
    return impl


def _checked(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, masks: Masks, scale: float | None, prune: Prune
) -> Call:
    bias = _checked_bias(NO_BIAS if bias is None else bias, q, k)
    as_number(prune)
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number, got a Tensor; multiply q by it instead")
    if q.shape[-1] == 0:  # all logits are zero, or the bias: as with one feature that is zero
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k, v, bias.at_scale(scale), masks, scale, prune)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, tokens, features), got shape {tuple(tensor.shape)}; "
                "use view(B, T, H, D).transpose(1, 2) on a projection of width H * D"
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "q (B, H, Tq, D), k (B, Hkv, Tk, D) and v (B, Hkv, Tk, Dv) must share B and D, k and v also "
            f"Hkv and Tk; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"q, k and v must share a floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them"
        )
    _check_devices(q, {"k": k, "v": v})


def _checked_bias(bias: Bias, q: Tensor, k: Tensor) -> Bias:
    if not isinstance(bias, Bias):
        raise TypeError(
            f"bias must be one of the kinds in grape_pe.bias, got {type(bias).__name__}; "
            "wrap a function of tiles in TileBias"
        )
    bias.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_devices(q, {**bias.views(), **bias.traces()}, "of the bias ")
    return SlopeBias((bias,)) if isinstance(bias, SlopeTerm) else bias


def _check_devices(q: Tensor, others: Mapping[str, Tensor | None], of: str = "") -> None:
    """The kernels read addresses: a tensor elsewhere must be an error, and before anything is read."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} {of}is on {tensor.device} but q is on {q.device}; move one of them")


def _masks(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None = None,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding: Tensor | None = None,
    sinks: int = 0,
    key_bound: Tensor | None = None,
) -> Masks:
    batch, length = k.shape[0], k.shape[2]
    if cu_seqlens is not None:
        if documents is not None:
            raise ValueError("documents and cu_seqlens say the same thing; give one of them")
        documents = documents_from_lengths(cu_seqlens, length)
    if q.shape[2] > length and (causal or documents is not None):
        what = "causal attention" if causal else "attention over documents"
        raise ValueError(f"{what} needs at least as many keys as queries, got {length} and {q.shape[2]}")
    if window is not None:
        window = _checked_window(window, q.shape[2] + length)
    if sinks < 0 or (sinks and window is None):
        raise ValueError(f"sinks are keys that outlive a window: give window=… and sinks >= 0, got {sinks}")
    if key_bound is not None and key_bound.shape != k.shape[:2]:
        raise ValueError(
            f"key_bound must be {tuple(k.shape[:2])}, a number for each key head; "
            f"got {tuple(key_bound.shape)}"
        )
    ids, hidden = _ids(documents, batch, length), _hidden(key_padding, batch, length)
    _check_devices(q, {"documents": ids, "key_padding": hidden, "key_bound": key_bound})
    return Masks(q.shape[2], length, q.device, causal, window, ids, hidden, sinks, key_bound)


def _checked_window(window: int, tokens: int) -> int:
    """No larger than all there is: kernels add positions to it, in 32 bits."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window counts visible tokens: an integer of at least 1, got {window!r}")
    return min(window, tokens)


def _ids(documents: Tensor | None, batch: int, length: int) -> Tensor | None:
    if documents is None:
        return None
    ids = documents[None] if documents.dim() == 1 else documents
    if ids.shape not in ((1, length), (batch, length)) or ids.dtype not in ID_DTYPES:
        raise ValueError(
            f"documents must be integer ids of shape ({length},) or ({batch}, {length}), one for each "
            f"key; got {documents.dtype} {tuple(documents.shape)}"
        )
    return ids


def _hidden(key_padding: Tensor | None, batch: int, length: int) -> Tensor | None:
    if key_padding is None:
        return None
    if key_padding.shape != (batch, length) or key_padding.dtype != torch.bool:
        raise ValueError(
            f"key_padding must be bool of shape ({batch}, {length}), True on padding; "
            f"got {key_padding.dtype} {tuple(key_padding.shape)}"
        )
    return key_padding
