"""Checks one implementation of attention on a small case against float64: output, gradients, determinism.

    python -m grape_pe.attention.gpu.check '{"impl": "triton", "device": "cuda", "dtype": "bfloat16",
        "head_dim": 64, "value_dim": 64, "bias": "slope", "masks": ["causal"]}'

prints one line of JSON, the verdict. In norm, half precision may have twice the error of the dense
computation in the same dtype; float32 four times it, or 1e-5 relative.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...bias import NO_BIAS, Bias, DistanceBias, PathBias, SlopeBias, SlopeTerm
from .. import attend
from . import tune
from .store import Tiles
from .verdict import LIMIT, Verdict

#: error allowed as a multiple of the dense error in the same dtype
HALF, FULL = 2.0, 4.0
#: relative error always allowed where numbers are kept in float32
ALWAYS = 1e-5
#: kernels of this library. Torch's own may round their output before the backward pass reads it, so that
#: in half precision the gradients of float32 rates and coordinates have half precision too.
OURS = ("cpu", "triton")
BATCH, HEADS, KV_HEADS, PROBE = 2, 4, 2, 8
#: mixed tables, and their distances: fewer than there are
TABLES, FIRST, DISTANCES = 2, -20, 90
#: numbers of queries in the checks of decoding, which need no gradients
FEW = (1, 3)
#: bytes filled with NaN and freed before a repetition, so that reads of memory nobody wrote are seen
POISON = 64 * 2**20

Tensors = dict[str, Tensor]
Errors = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Problem:
    """What to check: implementation, device, and the kind of call."""

    impl: str
    device: str
    dtype: str
    head_dim: int
    value_dim: int
    bias: str
    masks: tuple[str, ...] = ("causal",)
    tokens: int = 200

    def masking(self) -> dict[str, Any]:
        """Arguments of `attend`. No border falls on a tile's; the padding leaves rows that see no key."""
        given: dict[str, Any] = {"causal": "causal" in self.masks}
        if "window" in self.masks:
            given["window"] = self.tokens // 3
        if not {"documents", "padding"} & set(self.masks):
            return given
        token = torch.arange(self.tokens, device=self.device)
        if "documents" in self.masks:
            given["documents"] = (token > self.tokens * 0.4).long() + (token > self.tokens * 0.9).long()
        if "padding" in self.masks:
            first = torch.tensor([0, self.tokens // 8 + 1], device=self.device)
            given["key_padding"] = token < first[:, None]
        return given


def inputs(problem: Problem) -> Tensors:
    """Seeded tensors in the dtypes a model would have: rates in float32, coordinates in float64."""
    generator = torch.Generator().manual_seed(0)
    dtype, length = getattr(torch, problem.dtype), problem.tokens

    def normal(*size: int) -> Tensor:
        return torch.randn(BATCH, *size, generator=generator, dtype=torch.float64)

    made = {
        "q": normal(HEADS, length, problem.head_dim).to(dtype),
        "k": normal(KV_HEADS, length, problem.head_dim).to(dtype),
        "v": normal(KV_HEADS, length, problem.value_dim).to(dtype),
    }
    if "slope" in problem.bias:
        c = (0.3 * normal(HEADS, length).abs()).cumsum(-1)
        rates = {name: (0.2 * normal(HEADS, length).abs()).float() for name in ("rate_q", "rate_k")}
        made |= {"c_q": c, "c_k": c.clone(), **rates}
    if "path" in problem.bias:
        rate = 2.0 ** -torch.arange(1, HEADS + 1).view(1, HEADS, 1)
        made |= {name: normal(KV_HEADS, length, PROBE).to(dtype) for name in ("probe_q", "probe_k")}
        made["rate"] = rate.float()
    if "distance" in problem.bias:
        made["table"] = normal(HEADS, 1, TABLES, DISTANCES)[:1].float()
        made["mix"] = normal(HEADS, length, TABLES).float()
    return {name: tensor.to(problem.device) for name, tensor in made.items()}


def bias_of(t: Tensors) -> Bias:
    bias: Bias = NO_BIAS
    if "c_q" in t:
        bias = bias + SlopeBias((SlopeTerm(t["c_q"], t["c_k"], t["rate_q"], t["rate_k"]),))
    if "probe_q" in t:
        bias = bias + PathBias(t["probe_q"], t["probe_k"], t["rate"])
    if "table" in t:
        places = torch.arange(t["q"].shape[2], device=t["q"].device)[None, None]
        bias = bias + DistanceBias(places, places, t["table"], t["mix"], FIRST)
    return bias


def call(problem: Problem, t: Tensors, few: int | None, function: Callable[..., Any] = attend) -> Any:
    """`attend`, or another function of its arguments, for the last `few` queries; all of them for None."""
    q, bias = t["q"], bias_of(t)
    if few is not None:
        rows = slice(q.shape[2] - few, None)
        q, bias = q[:, :, rows], bias.queries(rows)
    return function(q, t["k"], t["v"], bias=bias, impl=problem.impl, **problem.masking())


def why_not(problem: Problem, tensors: Tensors, few: int | None = None) -> str | None:
    """Why the implementation refuses the problem, or None."""
    t = {name: tensor.detach().requires_grad_(few is None) for name, tensor in tensors.items()}
    try:
        with torch.set_grad_enabled(few is None):
            call(problem, t, few, attend.explain)
    except ValueError as refusal:
        return str(refusal)
    return None


def evaluate(problem: Problem, tensors: Tensors, learns: bool, few: tuple[int, ...]) -> Tensors:
    """Output and every gradient of one call with all queries, and outputs of calls with few queries."""
    found = {}
    if learns:
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
        y = call(problem, leaves, None)
        y.backward(_direction(y))
        found["out"] = y.detach()
        found |= {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    with torch.no_grad():
        return found | {f"out[{count}]": call(problem, tensors, count) for count in few}


def _direction(y: Tensor) -> Tensor:
    """The gradient that comes back, in a dtype's own numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator).to(torch.float16).to(y.device, y.dtype)


def errors(problem: Problem, truth: Tensors, dense: Tensors, got: Tensors) -> Errors:
    """Relative error in norm of each tensor, of its dense counterpart, and what is allowed."""
    eps = torch.finfo(getattr(torch, problem.dtype)).eps
    always = ALWAYS if problem.impl in OURS else max(ALWAYS, eps)
    found = {}
    for name, right in truth.items():
        size = max(right.norm().item(), 1e-30)
        away = ((x[name].double() - right).nan_to_num(1e30, 1e30, 1e30) for x in (got, dense))
        mine, plain = (x.norm().item() / size for x in away)
        half = got[name].dtype in (torch.float16, torch.bfloat16)
        allowed = HALF * plain if half else max(FULL * plain, always)
        found[name] = {"error": mine, "dense": plain, "allowed": allowed}
    return found


def check(problem: Problem) -> Verdict:
    """Verdict on one implementation and one kind of call."""
    tensors = inputs(problem)
    refusal = why_not(problem, tensors)
    calls = refusal is None, tuple(n for n in FEW if why_not(problem, tensors, n) is None)
    if refusal is not None and not calls[1]:
        return Verdict(refusal)
    got = evaluate(problem, tensors, *calls)
    reference = replace(problem, impl="reference")
    double = {name: tensor.double() for name, tensor in tensors.items()}
    truth, dense = (evaluate(reference, given, *calls) for given in (double, tensors))
    found = errors(problem, truth, dense, got)
    wrong = [name for name, row in found.items() if not row["error"] <= row["allowed"]]
    if wrong:
        row = found[max(wrong, key=lambda name: found[name]["error"] / found[name]["allowed"])]
        reason = f"wrong numbers in {', '.join(wrong)}: relative error {row['error']:.1e}, "
        return Verdict(reason + f"allowed {row['allowed']:.1e}", found)
    changed: set[str] = set()
    for fill in (0.0, float("nan")):  # the result must not depend on earlier contents of memory
        torch.full((POISON // 4,), fill, device=problem.device)
        again = evaluate(problem, tensors, *calls)
        changed |= {name for name in got if not torch.equal(again[name], got[name])}
    differ = f"repeated calls differ in {', '.join(sorted(changed))}" if changed else None
    return Verdict(differ, found, repeatable=not changed)


def safely(problem: Problem, tiles: Tiles | None = None, columns: list[Tiles] | None = None) -> Verdict:
    """The check, with whatever it raises as the reason.

    `tiles`: of the Triton kernels, instead of those they would choose. `columns`: time these, check nothing.
    """
    try:
        if columns is not None:
            return tune.measured(problem, columns)
        if tiles is not None:
            tune.force(tiles)
        return check(problem)
    except torch.OutOfMemoryError as error:
        return Verdict(f"no memory left on the device for the check: {error}", conclusive=False)
    except Exception as error:
        return Verdict(f"{type(error).__name__}: {error}")


def main() -> int:
    given = json.loads(sys.argv[1])
    tiles, columns = given.pop("tiles", None), given.pop("columns", None)
    result = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    if hasattr(signal, "alarm"):
        signal.alarm(2 * int(LIMIT))  # in case the parent has ended
    verdict = safely(Problem(**given | {"masks": tuple(given["masks"])}), tiles, columns)
    with os.fdopen(result, "w") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
