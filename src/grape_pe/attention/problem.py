"""One attention call as tensors (`AttentionProblem`), and the custom op that computes it.

Every compiled kernel reads an `AttentionProblem`; nothing else turns a `Bias` and `Masks` into tensors. The
op `grape::attention` has two kernels behind it, "cpu" (attention/cpu) and "triton" (attention/gpu). Each of
their `launch` modules has three functions:

    allocate(problem) -> list[Tensor]
        Empty tensors for what the backward needs besides out, lse, work. Only sizes are read: it also
        runs on fake tensors.
    forward(problem, results) -> None
        Fills results, [out, lse, work, *allocate(problem)]: out (B, H, Tq, Dv) in q's dtype; lse (B, H, Tq) float32,
        -inf for a row without a visible key; work (B, H, 2) int64, tiles computed and tiles visible.
    backward(problem, wanted, d_out, d_lse, results) -> dict[str, Tensor]
        Gradients of the fields named in `wanted`, in the shape and dtype of the field. d_lse may be None.

Neither is called with an empty problem.

Letters: B batch, H query heads, Hkv key heads, Hp probe heads, T tokens, D features, R slope terms, P probe
features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, parts_of, terms_of
from ..bias.distance import BEYOND
from .masks import Masks
from .pruning import OFF, Prune, as_number

Kernel = Literal["cpu", "triton"]
LAUNCH = {"cpu": ".cpu.launch", "triton": ".gpu.launch"}


@dataclass(eq=False, slots=True)
class AttentionProblem:
    """What a kernel computes: out = softmax(scale q k^T + slopes + path + distances) v over the visible keys.

    slopes(t, j) = sum over r of (rate_q[r, t] + rate_k[r, j]) (c_k[r, j] - c_q[r, t])
    path(t, j) = path_rate * sum for l = j+1 … t of g(<probe_q[t], probe_k[l]> / P), g a log-sigmoid, or sigmoid - 1
        if `bounded`

    distances(t, j) = sum over s of mix[t, s] table[s, place_q[t] - place_k[j] - first]; see `beyond`

    Expanded axes are views of stride 0. With Tq < Tk the last query stands at the last key.
    """

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor  # (B, Hkv, Tk, Dv)
    c_q: Tensor | None = None  # (R, B, H, Tq) float64
    c_k: Tensor | None = None  # (R, B, H, Tk) float64
    rate_q: Tensor | None = None  # (R, B, H, Tq) float32; None: zero
    rate_k: Tensor | None = None  # (R, B, H, Tk) float32; None: zero
    probe_q: Tensor | None = None  # (B, Hp, Tq, P) float32
    probe_k: Tensor | None = None  # (B, Hp, Tk, P) float32
    path_rate: Tensor | None = None  # (H,) float32
    table: Tensor | None = None  # (H, S, L) float32
    mix: Tensor | None = None  # (B, H, Tq, S) float32; None: one, and S is 1
    place_q: Tensor | None = None  # (B, Tq) int64
    place_k: Tensor | None = None  # (B, Tk) int64
    documents: Tensor | None = None  # (B, Tk) integer ids, not necessarily sorted
    key_padding: Tensor | None = None  # (B, Tk) bool, True hides
    key_bound: Tensor | None = None  # (B, Hkv) float32, an upper bound of |k|, or None when not known
    causal: bool = True
    window: int = 0  # 0: none; else keys closer than this, either side. May exceed Tk: clamp before 32 bits
    sinks: int = 0  # number of initial keys visible outside the window
    scale: float = 1.0
    bounded: bool = False  # link g: sigmoid - 1 instead of logsigmoid
    prune: float = OFF  # pruning.OFF, pruning.AUTO, or a distance in nats
    bias_learns: bool = False  # whether a gradient of the bias is wanted
    first: int = 0  # the distance of the table's first entry
    beyond: int = 0  # outside the table: index in BEYOND, the last entry, zero or -inf

    @classmethod
    def build(
        cls, q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
    ) -> Self:
        """The problem of one call; `why_not(bias)` must be None. Differentiable in every tensor."""
        p = cls(q, k, v, causal=masks.causal, window=masks.window or 0, sinks=masks.sinks)
        p.scale, p.prune = scale, as_number(prune)
        if masks.documents is not None:
            p.documents = masks.documents.expand(q.shape[0], -1)
        p.key_padding, p.key_bound = masks.key_padding, masks.key_bound
        terms = [term for part in parts_of(bias) for term in terms_of(part)]
        if terms:
            queries, keys = q.shape[:3], (*q.shape[:2], k.shape[2])
            p.c_q = _stacked([term.c_q for term in terms], torch.float64, queries)
            p.c_k = _stacked([term.c_k for term in terms], torch.float64, keys)
            p.rate_q = _stacked([term.rate_q for term in terms], torch.float32, queries)
            p.rate_k = _stacked([term.rate_k for term in terms], torch.float32, keys)
        for path in _paths(bias):
            p.probe_q, p.probe_k = (
                x.float().expand(q.shape[0], -1, -1, -1) for x in (path.probe_q, path.probe_k)
            )
            p.path_rate, p.bounded = path.rate.float().reshape(-1), path.link == "bounded"
        for distance in _distances(bias):
            p._add_distance(distance.resolved())
        biases = p.c_q, p.c_k, p.rate_q, p.rate_k, p.probe_q, p.probe_k, p.path_rate, p.table, p.mix
        p.bias_learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in biases)
        return p

    def _add_distance(self, bias: DistanceBias) -> None:
        batch, heads, queries = self.q.shape[:3]
        self.place_q, self.place_k = (
            x[:, 0].round().long().expand(batch, -1) for x in (bias.position_q, bias.position_k)
        )
        table = bias.table[0, :, 0].float()
        if bias.weight is None:
            table = table.sum(1, keepdim=True)
        else:
            self.mix = bias.weight.float().expand(batch, heads, queries, -1)
        self.table = table.expand(heads, -1, -1)
        self.first, self.beyond = bias.first, BEYOND.index(bias.beyond)

    @property
    def empty(self) -> bool:
        """No query, no key or no feature: the output is zeros, or has no elements."""
        return 0 in (*self.q.shape, *self.k.shape, self.v.shape[-1])

    @property
    def bias_kind(self) -> str:
        """As `bias_kind`, below."""
        return _kind(*(x is not None for x in (self.c_q, self.probe_q, self.table)))

    def packed(self) -> tuple[list[Tensor | None], list[float]]:
        """The problem as arguments of the op: its tensors and its numbers."""
        return [getattr(self, name) for name in TENSORS], [float(getattr(self, name)) for name in NUMBERS]

    @classmethod
    def unpacked(cls, tensors: Packed, numbers: list[float]) -> Self:
        """The inverse of `packed`."""
        causal, window, sinks, scale, bounded, prune, learns, first, beyond = numbers
        switches = bool(causal), int(window), int(sinks), scale, bool(bounded), prune, bool(learns)
        return cls(*tensors, *switches, int(first), int(beyond))  # type: ignore[arg-type, call-arg]


#: fields in order: the first twelve can have gradients
_NAMES = [field.name for field in fields(AttentionProblem)]
TENSORS, NUMBERS = tuple(_NAMES[:17]), tuple(_NAMES[17:])
DIFFERENTIABLE = TENSORS[:12]


# -------------------------------------------------------------------------------- from a Bias to tensors


def why_not(bias: Bias) -> str | None:
    """Why the kernels cannot compute this bias, or None: they know at most one path and one DistanceBias."""
    for part in parts_of(bias):
        if not isinstance(part, (NoBias, SlopeTerm, SlopeBias, PathBias, DistanceBias)):
            return f"its kernels compute SlopeBias, PathBias and DistanceBias, not {type(part).__name__}"
    if len(_paths(bias)) > 1:
        return "its kernels compute one PathBias, and the bias has several"
    distances = _distances(bias)
    if len(distances) > 1:
        return "its kernels compute one DistanceBias, and the bias has several"
    return distances[0].why_not_resolved() if distances else None


def bias_kind(bias: Bias) -> str:
    """Which kernels a bias needs: none, or some of slope, path and distance, joined by +."""
    slopes = any(terms_of(part) for part in parts_of(bias))
    return _kind(slopes, bool(_paths(bias)), bool(_distances(bias)))


def _kind(*has: bool) -> str:
    return "+".join(name for name, on in zip(("slope", "path", "distance"), has, strict=True) if on) or "none"


def _paths(bias: Bias) -> list[PathBias]:
    return [part for part in parts_of(bias) if isinstance(part, PathBias)]


def _distances(bias: Bias) -> list[DistanceBias]:
    return [part for part in parts_of(bias) if isinstance(part, DistanceBias)]


def _stacked(given: list[Tensor | None], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """(R, B, H, T) from (B|1, H|1, T|1) each, with zeros for None; None when nothing is given."""
    found = [x for x in given if x is not None]
    if len(given) == len(found) == 1:
        return found[0].to(dtype).expand(1, *shape)
    if not found:
        return None
    zero = found[0].new_zeros((), dtype=dtype)
    return torch.stack([(zero if x is None else x.to(dtype)).expand(shape) for x in given])


def as_two_floats(c: Tensor) -> tuple[Tensor, Tensor]:
    """c as float32 and what that leaves out: their differences, taken apart, lose nothing of c_j - c_t.

    An infinity is all in the first: infinity minus infinity would be NaN.
    """
    high = c.to(torch.float32)
    return high, torch.where(high.isfinite(), c - high, 0.0).to(torch.float32)


# --------------------------------------------------------------------------------------------- the op
#
# Defined with torch.library.Library: the wrappers of torch.library.custom_op take as long as a small call.

Packed = Sequence[Tensor | None]


def run(problem: AttentionProblem, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and work of the problem by the named kernel; out and lse are differentiable."""
    # Entered through the dispatcher the op takes 10 microseconds more; torch.compile must see it as one node.
    op = attention if torch.compiler.is_compiling() else _differentiable
    out, lse, work, *_ = op(kernel, *problem.packed())
    return out, lse, work


@functools.cache
def _launch(kernel: str) -> Any:
    return importlib.import_module(LAUNCH[kernel], __package__)


def _resolved(tensors: Packed) -> list[Tensor | None]:
    """Kernels read addresses, which do not tell that a negation is left to be done on reading."""
    return [None if x is None else x.resolve_neg() for x in tensors]


def _forward(kernel: str, tensors: Packed, numbers: list[float]) -> list[Tensor]:
    """[out, lse, work, *saved]: see the top of this file."""
    problem = AttentionProblem.unpacked(_resolved(tensors), numbers)
    results = _results(kernel, problem)
    if not problem.empty:
        _launch(kernel).forward(problem, results)
        return results
    for x in results:
        x.zero_()
    results[1].fill_(float("-inf"))
    return results


def _fake_forward(kernel: str, tensors: Packed, numbers: list[float]) -> list[Tensor]:
    return _results(kernel, AttentionProblem.unpacked(tensors, numbers))


def _results(kernel: str, p: AttentionProblem) -> list[Tensor]:
    out = p.q.new_empty((*p.q.shape[:3], p.v.shape[-1]))
    lse = p.q.new_empty(p.q.shape[:3], dtype=torch.float32)
    work = p.q.new_empty((*p.q.shape[:2], 2), dtype=torch.int64)
    return [out, lse, work, *_launch(kernel).allocate(p)]


def _backward(
    kernel: str,
    tensors: Packed,
    numbers: list[float],
    wanted: list[int],
    d_out: Tensor,
    d_lse: Tensor | None,
    results: list[Tensor],
) -> list[Tensor]:
    """Gradients of the tensors numbered in `wanted`, from those of the results of the forward."""
    names, problem = [TENSORS[i] for i in wanted], AttentionProblem.unpacked(_resolved(tensors), numbers)
    if problem.empty:
        return [torch.zeros_like(getattr(problem, name)) for name in names]
    grads = _launch(kernel).backward(problem, names, *_resolved([d_out, d_lse]), results)
    return [grads[name] for name in names]


def _fake_backward(
    kernel: str, tensors: Packed, numbers: list[float], wanted: list[int], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in map(tensors.__getitem__, wanted) if x is not None]


def _differentiable(kernel: str, tensors: Packed, numbers: list[float]) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return list(_Attention.apply(kernel, numbers, *tensors))  # type: ignore[no-untyped-call]
    return _below_autograd(attention, kernel, tensors, numbers)


def _below_autograd(op: Callable[..., Any], *arguments: Any) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: str, numbers: list[float], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        results = _below_autograd(attention, kernel, tensors, numbers)
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.save_for_backward(*tensors, *results)
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: gradient checkpointing allows no second time
        tensors, results = saved[: len(TENSORS)], saved[len(TENSORS) :]
        if d_out is None:
            d_out = torch.zeros_like(results[0])
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[2:]) if need]
        arguments = (ctx.kernel, tensors, ctx.numbers, wanted, d_out, d_lse, results)
        found: Sequence[Tensor] = _below_autograd(attention_backward, *arguments)
        if torch.is_grad_enabled():
            found = no_second_derivative(FUSED, found, [*tensors, d_out, d_lse])
        grads = dict(zip(wanted, found, strict=True))
        return None, None, *map(grads.get, range(len(TENSORS)))


FUSED = "grape.attend has no second derivative by its fused kernels; use impl='reference' or impl='blocks'"


def no_second_derivative(
    message: str, gradients: Sequence[Tensor], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients, which cannot be differentiated with respect to the inputs: that raises with the message."""
    return _NoSecondDerivative.apply(message, len(gradients), *gradients, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(ctx.message)


_LIBRARY = torch.library.Library("grape", "DEF")
_LIBRARY.define("attention(str kernel, Tensor?[] tensors, float[] numbers) -> Tensor[]")
_LIBRARY.define(
    "attention_backward(str kernel, Tensor?[] tensors, float[] numbers, int[] wanted, Tensor d_out, "
    "Tensor? d_lse, Tensor[] results) -> Tensor[]"
)
_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _differentiable, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("grape::attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("grape::attention_backward", _fake_backward, lib=_LIBRARY)

attention = torch.ops.grape.attention.default
attention_backward = torch.ops.grape.attention_backward.default
