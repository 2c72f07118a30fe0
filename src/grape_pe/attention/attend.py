"""`attend`: attention with any bias and any mask; `attend.explain`: which implementation it would take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..bias import NO_BIAS, Bias, NoBias, SlopeBias, SlopeTerm
from ..precision import without_autocast
from .blocks import attend_blocks
from .cpu.launch import attend_cpu, why_not_cpu
from .decode import attend_decode, why_not_decode
from .flex import attend_flex, why_not_flex
from .gpu.api import attend_triton, why_not_triton
from .gpu.verdict import why_not_trusted
from .masks import Masks, check_devices, checked_scale
from .problem import bias_kind
from .pruning import Prune, as_number
from .reference import attend_reference
from .sdpa import attend_sdpa, why_not_sdpa

#: logits below which a dense computation takes less time than the calls of any other
SMALL = 1 << 18

Attend = Callable[[Tensor, Tensor, Tensor, Bias, Masks, float, Prune], tuple[Tensor, Tensor | None]]
WhyNot = Callable[[Tensor, Tensor, Tensor, Bias, Masks], str | None]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention, and why it cannot do a call (None: it can)."""

    attend: Attend
    why_not: WhyNot = lambda *_: None
    has_lse: bool = True
    fused: bool = True  # kernels of its own or of torch, with reverse-mode gradients only


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(attend_reference, fused=False),
    "sdpa": Implementation(attend_sdpa, why_not_sdpa, has_lse=False),
    "cpu": Implementation(attend_cpu, why_not_cpu),
    "decode": Implementation(attend_decode, why_not_decode, has_lse=False),
    "blocks": Implementation(attend_blocks),
    "flex": Implementation(attend_flex, why_not_flex, has_lse=False),
    "triton": Implementation(attend_triton, why_not_triton),
}


@dataclass(frozen=True)
class Explanation:
    """Which implementation `attend` would take, why, and why not the others.

    Args:
        impl: the implementation.
        why: why it was chosen.
        why_not: for each other implementation, why it was not chosen.
    """

    impl: str
    why: str
    why_not: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {reason}" for name, reason in self.why_not.items())
        return f"{self.impl}: {self.why}{others}"


# ---------------------------------------------------------------------------------- the public function

Options = ParamSpec("Options")


class _Attend(Protocol[Options]):
    """The type of `attend`: a function with the attribute `explain`."""

    explain: Callable[Options, Explanation]

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first that fits counts
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Options.args, **kwargs: Options.kwargs) -> Tensor: ...


def _runs(checked: Callable[Options, Call]) -> _Attend[Options]:
    """The public function made from the one that checks its arguments."""

    @functools.wraps(checked)
    def attend(*args: Options.args, **kwargs: Options.kwargs) -> Tensor | tuple[Tensor, Tensor | None]:
        return checked(*args, **kwargs).run()

    def explain(*args: Options.args, **kwargs: Options.kwargs) -> Explanation:
        """Which implementation the same call of `attend` would take, and why; nothing is computed."""
        return checked(*args, **kwargs).explanation()

    signature, returns = inspect.signature(checked), Tensor | tuple[Tensor, Tensor]
    attend.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    explain.__signature__ = signature.replace(return_annotation=Explanation)  # type: ignore[attr-defined]
    attend.explain = explain  # type: ignore[attr-defined]
    return cast("_Attend[Options]", attend)


@_runs
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
) -> Call:
    """Attention with a bias: softmax(scale * q k^T + bias) v over the keys each query may see.

    No implementation but `reference` holds a T x T tensor; "auto" takes it under torch.func and forward mode, and for
    small calls on a CPU without a compiled kernel. `attend.explain(...)` with the same arguments names the
    implementation.

    Args:
        q: queries (B, H, Tq, D). With fewer queries than keys the last query is aligned with the last key.
        k: keys (B, Hkv, Tk, D), with H a multiple of Hkv.
        v: values (B, Hkv, Tk, Dv).
        bias: a `Bias`, such as `.bias` of what an encoding returns, or a sum of biases; None for no bias. It is not
            multiplied by `scale`.
        causal: a query sees its own token and those before it.
        window: a query sees tokens fewer than `window` away, itself included.
        documents: (Tk,) or (B, Tk) integer ids of packed sequences; a query sees only its own document.
        cu_seqlens: the same as cumulative lengths (0, n1, n1 + n2, …, Tk), for every row of the batch.
        key_padding: (B, Tk) bool, True where the key is padding.
        sinks: number of initial keys visible outside the window.
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
        float32 (float64 for float64 inputs), -inf for such a query.

    A query that holds a NaN or an infinity makes its own row NaN; a key or value makes the rows of all queries that
    see it NaN. Hidden ones have no effect. There is no second derivative, except by impl="reference" and "blocks".
    """
    check_tensors(q, k, v)
    masks = Masks.checked(q, k, causal, window, documents, cu_seqlens, key_padding, sinks, key_bound)
    bias = NO_BIAS if bias is None else bias
    if not isinstance(bias, Bias):
        raise TypeError(
            f"bias must be one of the kinds in grape_pe.bias, got {type(bias).__name__}; "
            "wrap a function of your own in ScoreBias or TileBias"
        )
    bias.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias = SlopeBias((bias,)) if isinstance(bias, SlopeTerm) else bias
    tensors = bias.tensors()
    check_devices(q, tensors, " of the bias")
    as_number(prune)
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(['auto', *IMPLEMENTATIONS])}; got {impl!r}")
    if q.shape[-1] == 0:  # all logits are zero, or the bias: as with one feature that is zero
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    scale = checked_scale(scale, q.shape[-1])
    inputs = q, k, v, bias.at_scale(scale), masks
    return Call(inputs, scale, prune, impl, return_lse, *_surroundings(q, k, v, *tensors.values()))


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless these are queries, keys and values that belong together."""
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
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point() or q.dtype.itemsize < 2:
        raise TypeError(
            "q, k and v must share a floating dtype of at least 16 bits, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; cast them"
        )
    check_devices(q, {"k": k, "v": v})


def _surroundings(*tensors: Tensor) -> tuple[bool, str | None]:
    """Whether gradients are wanted, and the transform under way that only plain torch operations support."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():
        return learns, None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return learns, "torch.func"
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return learns, "forward-mode"
    return learns, None


# ------------------------------------------------------------------------- which implementation computes it


@dataclass(eq=False, slots=True)
class Call:
    """One call of `attend`, checked."""

    inputs: tuple[Tensor, Tensor, Tensor, Bias, Masks]
    scale: float
    prune: Prune
    impl: str
    return_lse: bool
    learns: bool
    transform: str | None
    reasons: dict[str, str | None] = field(default_factory=dict)

    def why_not(self, name: str) -> str | None:
        """Why the implementation cannot do the call, or None; each is asked once."""
        if name not in self.reasons:
            self.reasons[name] = self._why_not(name, IMPLEMENTATIONS[name])
        return self.reasons[name]

    def _why_not(self, name: str, implementation: Implementation) -> str | None:
        if implementation.fused and self.transform is not None:
            return f"it has no derivative for {self.transform} transforms"
        if self.return_lse and not implementation.has_lse:
            return "it does not return the logsumexp"
        reason = implementation.why_not(*self.inputs)
        if reason is None and name == "triton" and self.impl == "auto":  # only after its check on the device
            q, _, v, bias, masks = self.inputs
            return why_not_trusted(q, v, bias_kind(bias), masks.names)
        return reason

    def choose(self) -> tuple[str, str]:
        """The implementation asked for, if it can do the call; with "auto" the first that can; and why."""
        if self.impl == "auto":
            names, why = self._preference()
            return next(name for name in [*names, "blocks"] if self.why_not(name) is None), why
        reason = self.why_not(self.impl)
        if reason is not None:
            able = ", ".join(name for name in IMPLEMENTATIONS if self.why_not(name) is None)
            raise ValueError(f"impl={self.impl!r} cannot do this: {reason}; these can: {able}")
        return self.impl, "asked for by name"

    def _preference(self) -> tuple[list[str], str]:
        """What `auto` tries, best first, and the reason for that order."""
        q, k, _, bias, masks = self.inputs
        if self.transform is not None:
            return ["reference"], f"a {self.transform} transform, which the fused kernels do not support"
        plain = isinstance(bias, NoBias) and masks.plain
        if q.is_cuda:
            why = "on CUDA torch's attention without a bias, else the fused kernel, then FlexAttention"
            return (["sdpa"] if plain else []) + ["triton", "decode", "flex"], why
        if plain and not self.learns:
            return ["sdpa", "decode", "cpu"], "no bias and no gradients: torch's own attention"
        reason = self.why_not("cpu")
        if reason is None:
            if not self.learns and self.why_not("decode") is None:
                return ["decode"], "a few queries and no gradients: the bias as rows, on torch's attention"
            return ["cpu"], "on CPU the compiled kernel, which skips tiles that cannot matter"
        if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= SMALL:
            return ["reference"], "so small that the dense computation is the quickest"
        if plain:
            return ["sdpa"], f"torch's own attention; no compiled kernel: {reason}"
        return ["decode"], f"plain torch, by blocks; no compiled kernel: {reason}"

    def run(self) -> Tensor | tuple[Tensor, Tensor | None]:
        q, k, v = self.inputs[:3]
        attend = IMPLEMENTATIONS[self.choose()[0]].attend
        with without_autocast(q):
            out, lse = attend(*self.inputs, self.scale, self.prune)
        if out.shape != (*q.shape[:3], v.shape[-1]):
            raise ValueError(
                f"the bias must broadcast to (B, H, Tq, Tk) = ({q.shape[0]}, {q.shape[1]}, {q.shape[2]}, "
                f"{k.shape[2]}), but made an output of shape {tuple(out.shape)}"
            )
        return (out, lse) if self.return_lse else out

    def explanation(self) -> Explanation:
        self.impl, why = (
            self.choose()
        )  # not "auto": to ask why not Triton would start its check on the device
        others = {name: self.why_not(name) for name in IMPLEMENTATIONS if name != self.impl}
        return Explanation(
            self.impl, why, {name: reason or "less preferred here" for name, reason in others.items()}
        )
