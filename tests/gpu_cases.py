"""Problems for the GPU kernels: with data for the emulator, without for the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grape_pe.attention import problem as problem_module
from grape_pe.attention.masks import Masks
from grape_pe.attention.problem import AttentionProblem
from grape_pe.attention.reference import attend_reference
from grape_pe.bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm


@dataclass(frozen=True)
class Case:
    bias: str = "none"  # of: slope, slope2 (two terms), alibi, path, bounded, table, mixed, joined by +
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    value_dim: int | None = None
    batch: int = 1
    heads: int = 2
    key_heads: int = 1
    probe_heads: int = 1
    queries: int = 130
    keys: int = 130
    causal: bool = True
    window: int | None = None
    documents: bool = False
    padding: bool = False
    prune: Any = None
    steep: float = 1.0
    beyond: Any = "last"  # of a table at the distances -10 … 49
    gaps: bool = False  # whether positions jump, and repeat
    lse: bool = False  # whether the loss uses the logsumexp too
    seed: int = 0

    def __str__(self) -> str:
        default = vars(Case())
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        shown = [f"{k}={v}" for k, v in vars(self).items() if k not in ("bias", "dtype") and v != default[k]]
        return "-".join([self.bias, names[self.dtype], *shown])

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def leaves(self) -> dict[str, Tensor]:
        """Named float64 tensors that the case's dtypes can hold."""
        g = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).double()

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=g, dtype=torch.float64).float().double()

        b, h, tq, tk = self.batch, self.heads, self.queries, self.keys
        made = {
            "q": normal(b, h, tq, self.head_dim),
            "k": normal(b, self.key_heads, tk, self.head_dim),
            "v": normal(b, self.key_heads, tk, self.value_dim or self.head_dim),
        }
        c = 3.0 + (uniform(b, h, max(tk, tq)) * 0.4).cumsum(-1)
        for r in range(2 if "slope2" in self.bias else 1 if "slope" in self.bias else 0):
            made[f"c_q{r}"], made[f"c_k{r}"] = c[..., max(tk - tq, 0) :] * (r + 1), c[..., :tk] * (r + 1)
            made[f"rate_q{r}"] = self.steep * (uniform(b, h, tq) + (self.steep > 1))
            if r == 0:
                made[f"rate_k{r}"] = self.steep * uniform(b, h, tk)
        if "alibi" in self.bias:
            made["c_q0"] = torch.arange(tk - tq, tk, dtype=torch.float64)[None, None]
            made["c_k0"] = torch.arange(tk, dtype=torch.float64)[None, None]
            made["rate_q0"] = self.steep * 0.5 ** torch.arange(1.0, h + 1, dtype=torch.float64)[None, :, None]
        if "path" in self.bias or "bounded" in self.bias:
            made["probe_q"] = normal(b, self.probe_heads, tq, 8, dtype=torch.float32)
            made["probe_k"] = normal(b, self.probe_heads, tk, 8, dtype=torch.float32)
            made["rate"] = self.steep * (0.25 + uniform(1, h, 1))
        if "table" in self.bias or "mixed" in self.bias:
            tables = 2 if "mixed" in self.bias else 1
            made["table"] = normal(1, 1 if tables == 1 else h, 1, tables, 60, dtype=torch.float32)
            if tables > 1:
                made["mix"] = normal(b, h, tq, tables, dtype=torch.float32)
        return made

    def positions(self, device: torch.device) -> Tensor:
        """(B, 1, max(Tq, Tk)): far from zero; they start again with each document, or jump and repeat."""
        at = torch.arange(max(self.keys, self.queries), device=device)
        if self.documents:
            at = at % 47
        if self.gaps:
            at = at + at // 29 * 5 - at // 50
        return at + 2**33 * torch.arange(1, self.batch + 1, device=device)[:, None, None]

    def cast(self, made: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Coordinates stay float64, rates and probes never go below float32."""
        wide = torch.promote_types(dtype, torch.float32)

        def kind(name: str) -> torch.dtype:
            return torch.float64 if name.startswith("c_") else dtype if name in "qkv" else wide

        return {name: x.to(kind(name)).detach().requires_grad_() for name, x in made.items()}

    def build_bias(self, leaves: dict[str, Tensor]) -> Bias:
        terms = tuple(
            SlopeTerm(
                leaves[f"c_q{r}"], leaves[f"c_k{r}"], leaves.get(f"rate_q{r}"), leaves.get(f"rate_k{r}")
            )
            for r in range(2)
            if f"c_q{r}" in leaves
        )
        bias: Bias = SlopeBias(terms) if terms else NoBias()
        if "rate" in leaves:
            link: Any = "bounded" if "bounded" in self.bias else "logsigmoid"
            bias = bias + PathBias(leaves["probe_q"], leaves["probe_k"], leaves["rate"], link)
        if "table" in leaves:
            places = self.positions(leaves["q"].device)
            sides = (
                places[..., max(self.keys - self.queries, 0) :][..., : self.queries],
                places[..., : self.keys],
            )
            bias = bias + DistanceBias(*sides, leaves["table"], leaves.get("mix"), -10, self.beyond)
        return bias

    def masks(self, device: str = "cpu") -> Masks:
        b, tk = self.batch, self.keys
        documents = (torch.arange(tk) // 47 % 2 * 7).expand(b, tk).to(device) if self.documents else None
        hidden = None
        if self.padding:
            hidden = torch.zeros(b, tk, dtype=torch.bool, device=device)
            hidden[0, :3] = hidden[-1, tk // 2] = True  # the first rows of the first sequence see no key
        return Masks(self.queries, tk, torch.device(device), self.causal, self.window, documents, hidden)

    def problem(self, leaves: dict[str, Tensor]) -> AttentionProblem:
        bias, masks = self.build_bias(leaves), self.masks(leaves["q"].device.type)
        return AttentionProblem.build(
            leaves["q"], leaves["k"], leaves["v"], bias, masks, self.scale, self.prune
        )

    def empty_problem(self) -> AttentionProblem:
        """The problem on tensors without data, for the compiler."""
        given = self.cast(self.leaves(), self.dtype)
        return self.problem({name: x.detach().to("meta").requires_grad_() for name, x in given.items()})


def with_gradients(case: Case, leaves: dict[str, Tensor], out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """out, lse and every gradient in float64, for a fixed random direction."""
    g = torch.Generator().manual_seed(case.seed + 1)
    towards = torch.randn(out.shape, generator=g, dtype=torch.float64).to(case.dtype)
    outputs, directions = [out], [towards.to(out.dtype)]
    if case.lse:
        towards_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64).float()
        seen = lse > float("-inf")
        outputs.append(lse[seen])
        directions.append(towards_lse[seen].to(lse.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), directions)
    found = {"out": out, "lse": lse, **{f"d {name}": x for name, x in zip(leaves, grads, strict=True)}}
    return {name: x.detach().double() for name, x in found.items()}


def by_kernels(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    leaves = case.cast(case.leaves(), case.dtype)
    out, lse, work = problem_module.run(case.problem(leaves), "triton")
    return with_gradients(case, leaves, out, lse), work


def by_reference(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = case.cast(case.leaves(), dtype)
    qkv = (leaves[name] for name in "qkv")
    out, lse = attend_reference(*qkv, case.build_bias(leaves), case.masks(), case.scale, None)
    return with_gradients(case, leaves, out, lse)


def _in_two(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the sum of two numbers of a dtype."""
    coarse = x.to(dtype).double()
    return coarse + (x - coarse).to(dtype).double()


def unavoidable(case: Case) -> dict[str, float]:
    """Errors of the bias's gradients when the formula is exact but for two roundings that the kernels make:

    the weights that enter the product with v, and the output, are kept as two numbers of the case's dtype. The
    backward subtracts <dO, O> from <dO, v_j>. Where one key dominates a row these are nearly equal.
    """
    leaves = case.cast(case.leaves(), torch.float64)
    rows, cols = slice(0, case.queries), slice(0, case.keys)
    group = case.heads // case.key_heads
    q, k, v = (leaves[name].detach() for name in "qkv")
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    bias = case.build_bias(leaves).tile(rows, cols)
    names = [name for name in leaves if name not in "qkv"]
    if bias is None or not names:
        return {}
    bias = bias.expand(*q.shape[:3], case.keys)
    hidden = ~case.masks().tile(rows, cols)
    logits = (case.scale * (q @ k.mT) + bias.detach()).masked_fill(hidden, float("-inf"))
    peak = logits.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    weights = (logits - peak).exp()
    total = weights.sum(-1, keepdim=True).clamp_min(1e-300)
    exact, kept = weights @ v / total, _in_two(_in_two(weights, case.dtype) @ v / total, case.dtype)
    g = torch.Generator().manual_seed(case.seed + 1)
    towards = torch.randn(exact.shape, generator=g, dtype=torch.float64).to(case.dtype).double()
    wrong = weights / total * (towards * (exact - kept)).sum(-1, keepdim=True)
    grads = torch.autograd.grad(bias, [leaves[name] for name in names], wrong)
    return {f"d {name}": grad.norm().item() for name, grad in zip(names, grads, strict=True)}


def ratios(case: Case, got: dict[str, Tensor]) -> dict[str, float]:
    """Error over allowed error, by tensor: at most 1.

    Half precision: twice the dense error. float32, and gradients of the bias, which are float32 numbers: four
    times the dense error, or 1e-5 relative if that is more. In half precision gradients of the bias may also
    have twice the `unavoidable` error.
    """
    truth, dense = by_reference(case, torch.float64), by_reference(case, case.dtype)
    half = case.dtype != torch.float32
    rounding = unavoidable(case) if half else {}
    found = {}
    for name, right in truth.items():
        right = right.nan_to_num(0.0, 0.0, 0.0)
        ours, theirs = ((x[name].nan_to_num(1e30, 0.0, 0.0) - right).norm().item() for x in (got, dense))
        size = right.norm().item()
        if half and name in ("out", "d q", "d k", "d v"):
            allowed = 2 * theirs
        else:  # a gradient may be exactly zero: with one key it is
            allowed = max(4 * theirs, 1e-5 * size, 0.0 if half else 1e-5, 2 * rounding.get(name, 0.0))
        found[name] = ours / max(allowed, 1e-12)
    return found


def launches(case: Case, arch: int) -> Iterator[Any]:
    """Every launch of a forward and a backward call, for the compiler."""
    from grape_pe.attention.gpu import launch as gpu

    p = case.empty_problem()
    plan = gpu.Plan.of(p, arch)
    results = problem_module._results("triton", p)
    yield from gpu.plan_forward(plan, results)
    wanted = [name for name in problem_module.DIFFERENTIABLE if getattr(p, name) is not None]
    grads = gpu.empty_gradients(plan, wanted)
    yield from gpu.plan_backward(plan, results[0], None, results, grads)
