"""`attend`: attention with any bias and any mask; `attend.explain`: which implementation it would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, Unpack, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..bias import NO_BIAS, Bias, NoBias, SlopeBias, SlopeTerm
from ..precision import without_autocast
from .blocks import attend_blocks, why_not_blocks
from .cpu.launch import attend_cpu, why_not_cpu
from .decode import attend_decode, why_not_decode
from .flex import attend_flex, why_not_flex
from .gpu.api import attend_triton, why_not_triton
from .gpu.verdict import why_not_trusted
from .masks import Masks, documents_from_lengths
from .problem import bias_kind
from .pruning import Prune, as_number
from .reference import attend_reference
from .sdpa import attend_sdpa, why_not_sdpa

#: logits below which a dense computation takes less time than the calls of any other
SMALL = 1 << 18
#: dtypes of document ids; torch computes little with the other integers
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

Attend = Callable[[Tensor, Tensor, Tensor, Bias, Masks, float, Prune], tuple[Tensor, Tensor | None]]
WhyNot = Callable[[Tensor, Tensor, Tensor, Bias, Masks], str | None]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, and why it cannot do a call (None: it can)."""

    attend: Attend
    why_not: WhyNot
    has_lse: bool = True
    fused: bool = True  # kernels of its own or of torch, with reverse-mode gradients only


@dataclass(frozen=True)
class Explanation:
    """Which implementation `attend` would take, why, and why not the others."""

    impl: str
    why: str
    why_not: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {reason}" for name, reason in self.why_not.items())
        return f"{self.impl}: {self.why}{others}"


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(attend_reference, lambda *_: None, fused=False),
    "sdpa": Implementation(attend_sdpa, why_not_sdpa, has_lse=False),
    "cpu": Implementation(attend_cpu, why_not_cpu),
    "decode": Implementation(attend_decode, why_not_decode, has_lse=False),
    "blocks": Implementation(attend_blocks, why_not_blocks),
    "flex": Implementation(attend_flex, why_not_flex, has_lse=False),
    "triton": Implementation(attend_triton, why_not_triton),
}


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
    return_lse: bool

    @property
    def logits(self) -> int:
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.bias.views().values(), *self.bias.traces().values()]

    @property
    def learns(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors)

    @property
    def transformed(self) -> str | None:
        """The transform under way that only plain torch operations support, or None."""
        if torch.compiler.is_compiling():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "torch.func"
        if any(unpack_dual(x).tangent is not None for x in self.tensors):
            return "forward-mode"
        return None

    def why_not(self, name: str) -> str | None:
        implementation = IMPLEMENTATIONS[name]
        if implementation.fused and self.transformed is not None:
            return f"it has no derivative for {self.transformed} transforms"
        if self.return_lse and not implementation.has_lse:
            return "it does not return the logsumexp"
        return implementation.why_not(self.q, self.k, self.v, self.bias, self.masks)

    def why_not_auto(self, name: str) -> str | None:
        """As `why_not`; `auto` takes the Triton kernels only after they passed their check on the device."""
        reason = self.why_not(name)
        if reason is None and name == "triton":
            return why_not_trusted(self.q, self.v, bias_kind(self.bias), self.masks.names)
        return reason

    def run(self, name: str) -> tuple[Tensor, Tensor | None]:
        attend = IMPLEMENTATIONS[name].attend
        with without_autocast(self.q):
            return attend(self.q, self.k, self.v, self.bias, self.masks, self.scale, self.prune)


def _preference(call: Call) -> tuple[list[str], str]:
    """What `auto` tries, best first, and the reason for that order."""
    if call.transformed is not None:
        return ["reference"], f"a {call.transformed} transform, which the fused kernels do not support"
    device = call.q.device.type
    plain = isinstance(call.bias, NoBias) and call.masks.plain
    if device == "cuda":
        why = "on CUDA torch's attention without a bias, else the fused kernel, then FlexAttention"
        return (["sdpa"] if plain else []) + ["triton", "decode", "flex", "blocks"], why
    if plain and not call.learns:
        return ["sdpa", "decode", "cpu", "blocks"], "no bias and no gradients: torch's own attention"
    if call.why_not("cpu") is None:
        if call.why_not("decode") is None:
            return ["decode"], "a few queries and no gradients: the bias as rows, on torch's attention"
        return ["cpu"], "on CPU the compiled kernel, which skips tiles that cannot matter"
    if plain:
        return ["sdpa", "blocks"], f"torch's own attention; no compiled kernel: {call.why_not('cpu')}"
    if call.logits <= SMALL:
        return ["reference"], "so small that the dense computation is the quickest"
    return ["decode", "blocks"], f"plain torch, by blocks; no compiled kernel: {call.why_not('cpu')}"


class Options(TypedDict, total=False):
    """Keyword arguments of `attend`."""

    bias: Bias | None
    causal: bool
    window: int | None
    documents: Tensor | None
    cu_seqlens: Tensor | None
    key_padding: Tensor | None
    sinks: int
    scale: float | None
    prune: Prune
    key_bound: Tensor | None
    impl: str


class _Attend(Protocol):
    """The type of `attend`: a function with the attribute `explain`."""

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Tensor: ...

    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
    ) -> Explanation: ...


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Explanation:
    """Which implementation the same call of `attend` would take, and why; nothing is computed."""
    impl = options.get("impl", "auto")
    asked: dict[str, Any] = {name: value for name, value in options.items() if name != "impl"}
    call = _call(q, k, v, return_lse=return_lse, **asked)
    chosen = _choose(call, impl)
    why = _preference(call)[1] if impl == "auto" else "asked for by name"
    why_not = call.why_not_auto if impl == "auto" else call.why_not
    refusals = {name: why_not(name) for name in IMPLEMENTATIONS if name != chosen}
    return Explanation(
        chosen, why, {name: reason or "less preferred here" for name, reason in refusals.items()}
    )


def _with_explain(function: Callable[..., Any]) -> _Attend:
    function.explain = explain  # type: ignore[attr-defined]
    return cast("_Attend", function)


@_with_explain
def attend(
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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a bias: softmax(scale * q k^T + bias) v over the keys each query may see.

    Never holds a T x T tensor. `attend.explain(...)` with the same arguments names the implementation.

    Args:
        q: queries (B, H, Tq, D). With fewer queries than keys the last query is aligned with the last key.
        k: keys (B, Hkv, Tk, D), with H a multiple of Hkv.
        v: values (B, Hkv, Tk, Dv).
        bias: what an `Encoding` returned, or a sum of such; None for zero. Never scaled.
        causal: a query sees its own token and those before it.
        window: a query sees tokens fewer than `window` away, itself included.
        documents: (Tk,) or (B, Tk) integer ids of packed sequences; a query sees only its own document.
        cu_seqlens: the same as cumulative lengths (0, n1, n1 + n2, …, Tk), for every row of the batch.
        key_padding: (B, Tk) bool, True where the key is padding.
        sinks: the number of first keys that stay visible whatever the window.
        scale: factor of q k^T, 1/sqrt(D) by default.
        prune: skip keys that cannot change the result: "auto" (below rounding), None (never), or a distance
            in nats below a row's largest logit.
        key_bound: (B, Hkv), an upper bound of the norm of every key, if one is known (a cache keeps one):
            decoding then skips distant keys unread.
        impl: reference, sdpa, cpu, decode, blocks, flex or triton; "auto" chooses. A named one that cannot do
            the call raises a ValueError and says why; it never falls back to another.
        return_lse: also return the logsumexp of each row's logits.

    Returns:
        (B, H, Tq, Dv) in v's dtype; zeros for a query that sees no key. With `return_lse` also (B, H, Tq) in
        float32, -inf for such a query.

    A query, or a visible key or value, that holds a NaN or an infinity makes its rows NaN; hidden ones change
    nothing. There is no second derivative, except by impl="reference" and "blocks".
    """
    call = _call(
        q, k, v, bias, causal, window, documents, cu_seqlens, key_padding, sinks, scale, prune, key_bound,
        return_lse,
    )  # fmt: skip
    out, lse = call.run(_choose(call, impl))
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _choose(call: Call, impl: str) -> str:
    if impl == "auto":
        return next(name for name in [*_preference(call)[0], "blocks"] if call.why_not_auto(name) is None)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(['auto', *IMPLEMENTATIONS])}; got {impl!r}")
    reason = call.why_not(impl)
    if reason is not None:
        able = ", ".join(name for name in IMPLEMENTATIONS if call.why_not(name) is None)
        raise ValueError(f"impl={impl!r} cannot do this: {reason}; these can: {able}")
    return impl


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return_lse: bool = False,
) -> Call:
    _check_shapes(q, k, v)
    masks = _masks(q, k, causal, window, documents, cu_seqlens, key_padding, sinks, key_bound)
    bias = _checked_bias(NO_BIAS if bias is None else bias, q, k)
    as_number(prune)
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number, got a Tensor; multiply q by it instead")
    if q.shape[-1] == 0:  # all logits are zero, or the bias: as with one feature that is zero
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k, v, bias.at_scale(scale), masks, scale, prune, return_lse)


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
            "wrap a function of your own in ScoreBias or TileBias"
        )
    bias.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_devices(q, {**bias.views(), **bias.traces()}, "of the bias ")
    return SlopeBias((bias,)) if isinstance(bias, SlopeTerm) else bias


def _check_devices(q: Tensor, others: Mapping[str, Tensor | None], of: str = "") -> None:
    """The kernels read addresses: a tensor on another device must be an error before anything is read."""
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
            raise ValueError("documents and cu_seqlens mean the same; give one of them")
        documents = documents_from_lengths(cu_seqlens, length)
    if q.shape[2] > length and (causal or documents is not None):
        what = "causal attention" if causal else "attention over documents"
        raise ValueError(f"{what} needs at least as many keys as queries, got {length} and {q.shape[2]}")
    window = _checked_window(window)
    if sinks < 0 or (sinks and window is None):
        raise ValueError(
            f"sinks keep the first keys visible outside a window: give window=… and sinks >= 0, got {sinks}"
        )
    if key_bound is not None and key_bound.shape != k.shape[:2]:
        raise ValueError(
            f"key_bound must be {tuple(k.shape[:2])}, a number for each key head; "
            f"got {tuple(key_bound.shape)}"
        )
    if key_bound is not None:  # a bound rounded to half precision may be below the norm it was made from
        key_bound = key_bound.float() * (1 + torch.finfo(key_bound.dtype).eps)
    ids, hidden = _ids(documents, batch, length), _hidden(key_padding, batch, length)
    _check_devices(q, {"documents": ids, "key_padding": hidden, "key_bound": key_bound})
    return Masks(q.shape[2], length, q.device, causal, window, ids, hidden, sinks, key_bound)


def _checked_window(window: int | None) -> int | None:
    if window is None:
        return None
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window counts visible tokens: an integer of at least 1, got {window!r}")
    return min(window, 1 << 40)  # positions are added to it, in 64 bits


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
