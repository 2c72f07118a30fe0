"""One attention call as tensors (`AttentionProblem`), and the custom op that computes it.

Every compiled kernel reads an `AttentionProblem`; nothing else turns a `Bias` and `Masks` into tensors. The
op `grape::attention` has two kernels behind it, "cpu" (attention/cpu) and "triton" (attention/gpu). Each of
their `launch` modules has three functions:

    allocate(problem) -> list[Tensor]
        Empty tensors for what the backward needs besides out, lse, work. Only sizes are read: it also
        runs on fake tensors.
    forward(problem) -> (out, lse, work, saved)
        out (B, H, Tq, Dv) in q's dtype; lse (B, H, Tq) float32, -inf for a row without a visible key;
        work (B, H, 2) int64, tiles computed and tiles visible; saved as `allocate` made them, filled.
    backward(problem, wanted, d_out, d_lse, results) -> dict[str, Tensor]
        Gradients of the fields named in `wanted`, in the shape and dtype of the field. d_lse may be None;
        results are [out, lse, work, *saved] of the forward.

Letters: B batch, H query heads, Hkv key heads, Hp probe heads, T tokens, D features, R slope terms, P probe
features.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ..bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from .masks import Masks
from .pruning import OFF, Prune, as_number

Kernel = Literal["cpu", "triton"]
LAUNCH = {"cpu": ".cpu.launch", "triton": ".gpu.launch"}


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """What a kernel computes: out = softmax(scale q k^T + slopes + path) v over the visible keys.

    slopes(t, j) = sum over r of (rate_q[r, t] + rate_k[r, j]) (c_k[r, j] - c_q[r, t])
    path(t, j) = path_rate * sum for l = j+1 … t of g(<probe_q[t], probe_k[l]> / P)

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
    documents: Tensor | None = None  # (B, Tk) integer ids, not necessarily sorted
    key_padding: Tensor | None = None  # (B, Tk) bool, True hides
    key_bound: Tensor | None = None  # (B, Hkv) float32, an upper bound of |k|, or None when not known
    causal: bool = True
    window: int = 0  # 0: none; else keys closer than this, either side. May exceed Tk: clamp before 32 bits
    sinks: int = 0  # the first keys, visible whatever the window
    scale: float = 1.0
    bounded: bool = False  # link g: sigmoid - 1 instead of logsigmoid
    prune: float = OFF  # pruning.OFF, pruning.AUTO, or a distance in nats
    bias_learns: bool = False  # whether a gradient of c, a rate or a probe is wanted

    @classmethod
    def build(
        cls, q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
    ) -> Self:
        """The problem of one call; `why_not(bias)` must be None. Differentiable in every tensor."""
        terms, path = _split(bias)
        batch = q.shape[0]
        traces = [*bias.views().values(), *bias.traces().values()]
        return cls(
            q,
            k,
            v,
            **_stack_terms(terms, q, k),
            **_expand_path(path, batch),
            documents=None if masks.documents is None else masks.documents.expand(batch, -1),
            key_padding=masks.key_padding,
            key_bound=masks.key_bound,
            causal=masks.causal,
            window=masks.window or 0,
            sinks=masks.sinks,
            scale=scale,
            bounded=path is not None and path.link == "bounded",
            prune=as_number(prune),
            bias_learns=torch.is_grad_enabled() and any(x.requires_grad for x in traces),
        )

    @property
    def empty(self) -> bool:
        """No query, no key or no feature: the output is zeros, or has no elements."""
        return 0 in (*self.q.shape, *self.k.shape, self.v.shape[-1])

    @property
    def shift(self) -> int:
        """The key index at which query row 0 stands."""
        return self.k.shape[2] - self.q.shape[2]

    def packed(self) -> tuple[str, list[Tensor], list[float]]:
        """The problem as arguments of the op: names of the tensors present, the tensors, the numbers."""
        given = {name: getattr(self, name) for name in TENSORS}
        names = [name for name, x in given.items() if x is not None]
        return " ".join(names), [given[name] for name in names], [float(getattr(self, n)) for n in NUMBERS]

    @classmethod
    def unpacked(cls, names: str, tensors: list[Tensor], numbers: list[float]) -> Self:
        """The inverse of `packed`."""
        values: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
        for name, number in zip(NUMBERS, numbers, strict=True):
            values[name] = _KINDS[name](number)
        return cls(**values)


#: fields in order: the first ten can have gradients
TENSORS = tuple(field.name for field in fields(AttentionProblem) if "Tensor" in str(field.type))
DIFFERENTIABLE = TENSORS[: TENSORS.index("documents")]
_KINDS = {"causal": bool, "window": int, "sinks": int, "scale": float}
_KINDS |= {"bounded": bool, "prune": float, "bias_learns": bool}
NUMBERS = tuple(_KINDS)


# -------------------------------------------------------------------------------- from a Bias to tensors


def why_not(bias: Bias) -> str | None:
    """Why the kernels cannot compute this bias, or None: they know slope terms and at most one path."""
    parts = bias.parts if isinstance(bias, SumBias) else (bias,)
    for part in parts:
        if not isinstance(part, (NoBias, SlopeBias, SlopeTerm, PathBias)):
            return f"its kernels compute SlopeBias and PathBias, not {type(part).__name__}"
    if sum(isinstance(part, PathBias) for part in parts) > 1:
        return "its kernels compute one PathBias, and the bias has several"
    return None


def bias_kind(bias: Bias) -> str:
    """none, slope, path or both: which kernels a bias needs."""
    terms, path = _split(bias)
    return ("path" if not terms else "both") if path is not None else ("slope" if terms else "none")


def _split(bias: Bias) -> tuple[list[SlopeTerm], PathBias | None]:
    terms: list[SlopeTerm] = []
    path = None
    for part in bias.parts if isinstance(bias, SumBias) else (bias,):
        if isinstance(part, SlopeBias):
            terms += part.terms
        elif isinstance(part, SlopeTerm):
            terms.append(part)
        elif isinstance(part, PathBias):
            path = part
    return terms, path


def _stack_terms(terms: list[SlopeTerm], q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """c_q, c_k, rate_q, rate_k as (R, B, H, T); a rate that no term has is left out."""
    found: dict[str, Tensor] = {}
    for name in ("c_q", "c_k", "rate_q", "rate_k") if terms else ():
        given = [getattr(term, name) for term in terms]
        if all(x is None for x in given):
            continue
        shape = (*q.shape[:2], (q if name.endswith("q") else k).shape[2])
        dtype = torch.float64 if name.startswith("c") else torch.float32
        zero = q.new_zeros((), dtype=dtype)
        full = [(zero if x is None else x.to(dtype)).expand(shape) for x in given]
        found[name] = full[0].unsqueeze(0) if len(full) == 1 else torch.stack(full)
    return found


def _expand_path(path: PathBias | None, batch: int) -> dict[str, Tensor]:
    if path is None:
        return {}
    return {
        "probe_q": path.probe_q.float().expand(batch, -1, -1, -1),
        "probe_k": path.probe_k.float().expand(batch, -1, -1, -1),
        "path_rate": path.rate.float().reshape(-1),
    }


def as_two_floats(c: Tensor) -> tuple[Tensor, Tensor]:
    """c as float32 and what that leaves out: their differences, taken apart, lose nothing of c_j - c_t.

    An infinity is all in the first: infinity minus infinity would be NaN.
    """
    high = c.to(torch.float32)
    return high, torch.where(high.isfinite(), c - high, 0.0).to(torch.float32)


# --------------------------------------------------------------------------------------------- the op


def run(problem: AttentionProblem, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and work of the problem by the named kernel; out and lse are differentiable."""
    out, lse, work, *_ = attention(kernel, *problem.packed())
    return out, lse, work


def _launch(kernel: str) -> Any:
    return importlib.import_module(LAUNCH[kernel], __package__)


@torch.library.custom_op("grape::attention", mutates_args=())
def attention(kernel: str, names: str, tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
    """[out, lse, work, *saved]: see the top of this file."""
    problem = AttentionProblem.unpacked(names, tensors, numbers)
    out, lse, work, saved = _launch(kernel).forward(problem)
    return [out, lse, work, *saved]


@attention.register_fake
def _(kernel: str, names: str, tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
    p = AttentionProblem.unpacked(names, tensors, numbers)
    out = p.q.new_empty((*p.q.shape[:3], p.v.shape[-1]))
    lse = p.q.new_empty(p.q.shape[:3], dtype=torch.float32)
    work = p.q.new_empty((*p.q.shape[:2], 2), dtype=torch.int64)
    return [out, lse, work, *_launch(kernel).allocate(p)]


@torch.library.custom_op("grape::attention_backward", mutates_args=())
def attention_backward(
    kernel: str,
    names: str,
    tensors: list[Tensor],
    numbers: list[float],
    wanted: str,
    d_out: Tensor,
    d_lse: Tensor | None,
    results: list[Tensor],
) -> list[Tensor]:
    """Gradients of the fields named in `wanted`, in that order; `results` are those of the forward op."""
    problem = AttentionProblem.unpacked(names, tensors, numbers)
    asked = wanted.split()
    grads = _launch(kernel).backward(problem, asked, d_out, d_lse, results)
    return [grads[name] for name in asked]


@attention_backward.register_fake
def _(
    kernel: str, names: str, tensors: list[Tensor], numbers: list[float], wanted: str, *_: Any
) -> list[Tensor]:
    given = dict(zip(names.split(), tensors, strict=True))
    return [given[name].new_empty(given[name].shape) for name in wanted.split()]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.kernel, ctx.names, tensors, ctx.numbers = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing allows no second time
    tensors, results = list(saved[: ctx.count]), list(saved[ctx.count :])
    d_out, d_lse = grads[:2]
    if d_out is None:
        d_out = torch.zeros_like(results[0])
    names = ctx.names.split()
    wanted = [name for name, need in zip(names, ctx.needs_input_grad[2], strict=True) if need]
    found = attention_backward(
        ctx.kernel, ctx.names, tensors, ctx.numbers, " ".join(wanted), d_out, d_lse, results
    )
    by_name = dict(zip(wanted, found, strict=True))
    return None, None, [by_name.get(name) for name in names], None


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "grape.attend has no second derivative by its fused kernels; use impl='reference' or impl='blocks'"
    )


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(_no_second_derivative)
