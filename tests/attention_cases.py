"""What the attention tests share: biases of every kind, evaluation with all gradients, one tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grape_pe.attention import attend
from grape_pe.bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, TileBias

#: Added to twice the dense computation's own error; and, each for itself, all that a number may be which is
#: exactly zero in the reference (the gradient of a row with one key: there dense rounding cancels exactly).
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
#: float64 is the reference's own dtype, so there the rule is relative.
RELATIVE = {torch.float64: 1e-12, torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

#: A slope's gradient is a handful of numbers, each a sum over all pairs of tokens: the dense error is one
#: draw of a lottery, at times near zero. A sum rounds relative to its sum of magnitudes: two ulp of that.
ULPS = 2

Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small problems: threads would only wait for one another (imported by the test files)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(
    keys: int,
    queries: int | None = None,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 24,
    value_width: int = 20,
    probe: int = 6,
    seed: int = 0,
) -> Inputs:
    """Everything any bias below may need, in float64."""
    g = torch.Generator().manual_seed(seed)
    queries = keys if queries is None else queries
    rows = max(0, keys - queries)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=g, dtype=torch.float64)

    c = (0.8 * uniform(batch, heads, max(keys, queries))).cumsum(-1)
    return {
        "q": normal(batch, heads, queries, width),
        "k": normal(batch, kv_heads, keys, width),
        "v": normal(batch, kv_heads, keys, value_width),
        "c_q": c[:, :, rows:] if queries <= keys else c,
        "c_k": c[:, :, :keys],
        "d_q": (0.5 * normal(batch, 1, queries)).cumsum(-1),
        "d_k": (0.5 * normal(batch, 1, keys)).cumsum(-1),
        "rate_q": 0.5 * uniform(batch, heads, queries),
        "rate_k": 0.5 * uniform(batch, heads, keys),
        "slope": 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64).view(1, heads, 1),
        "probe_q": 2 * normal(batch, kv_heads, queries, probe),
        "probe_k": 2 * normal(batch, kv_heads, keys, probe),
        "x_q": normal(batch, 1, queries, 3),
        "x_k": normal(batch, 1, keys, 3),
    }


def _radial(rows: slice, cols: slice, query: dict[str, Tensor], key: dict[str, Tensor]) -> Tensor:
    apart = query["x"][:, :, rows].unsqueeze(3) - key["x"][:, :, cols].unsqueeze(2)
    return -query["w"] * (apart.square().sum(-1) + 1.0).sqrt()


def _slope(i: Inputs, rate_q: str | None, rate_k: str | None) -> SlopeBias:
    pick = (i[name] if name else None for name in (rate_q, rate_k))
    return SlopeBias((SlopeTerm(i["c_q"], i["c_k"], *pick),))


def _alibi(i: Inputs) -> SlopeBias:
    queries, keys = i["q"].shape[2], i["k"].shape[2]
    at = torch.arange(max(queries, keys), dtype=torch.float64).view(1, 1, -1)
    return SlopeBias((SlopeTerm(at[..., at.shape[-1] - queries :], at[..., :keys], i["slope"].detach()),))


BIASES: dict[str, Callable[[Inputs], Bias]] = {
    "none": lambda i: NoBias(),
    "alibi": _alibi,
    "fox": lambda i: SlopeBias((SlopeTerm(i["c_q"], i["c_k"], torch.ones_like(i["slope"])),)),
    "a-q": lambda i: _slope(i, "rate_q", None),
    "a-k": lambda i: _slope(i, None, "rate_k"),
    "a-qk": lambda i: _slope(i, "rate_q", "rate_k"),
    # two coordinates, the second neither monotone nor with rates of one sign
    "terms": lambda i: (
        _slope(i, "rate_q", "rate_k") + SlopeBias((SlopeTerm(i["d_q"], i["d_k"], i["slope"] - 0.2),))
    ),
    "path": lambda i: PathBias(i["probe_q"], i["probe_k"], i["slope"]),
    "bounded": lambda i: PathBias(i["probe_q"], i["probe_k"], i["slope"], "bounded"),
    "slope+path": lambda i: _slope(i, "rate_q", None) + PathBias(i["probe_q"], i["probe_k"], i["slope"]),
    "tile": lambda i: TileBias(_radial, {"x": i["x_q"], "w": i["slope"].unsqueeze(-1)}, {"x": i["x_k"]}),
}
SLOPES = ("none", "alibi", "fox", "a-q", "a-k", "a-qk", "terms")


def cast(i: Inputs, dtype: torch.dtype, grad: bool = True) -> Inputs:
    """To a dtype; coordinates stay float64 and rates at least float32, as encodings make them."""

    def one(name: str, x: Tensor) -> Tensor:
        if name[:2] in ("c_", "d_"):
            return x.detach().clone().requires_grad_(grad)
        wide = name in ("slope", "rate_q", "rate_k") or name.startswith(("probe", "x_"))
        to = torch.promote_types(dtype, torch.float32) if wide else dtype
        return x.detach().to(to).requires_grad_(grad)

    return {name: one(name, x) for name, x in i.items()}


def evaluate(
    i: Inputs, kind: str, impl: str, dtype: torch.dtype, masks: dict, bias_grad: bool = True, **options
) -> dict[str, Tensor]:
    """The output and the gradient of every input that has one, in float64."""
    leaves = cast(i, dtype)
    traces = leaves if bias_grad else {name: x.detach() for name, x in leaves.items()}
    bias = BIASES[kind]({**traces, **{name: leaves[name] for name in "qkv"}})
    y = attend(leaves["q"], leaves["k"], leaves["v"], bias=bias, impl=impl, **masks, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y.double() * weight).sum().backward()
    found = {name: x.grad.double() for name, x in leaves.items() if x.grad is not None}
    return {"y": y.detach().double(), **found}


def rounded(i: Inputs, dtype: torch.dtype) -> Inputs:
    """Numbers the dtype can hold, in float64: what every implementation is given."""
    return {name: x.detach().double() for name, x in cast(i, dtype, grad=False).items()}


def assert_as_good_as_dense(
    i: Inputs, kind: str, impl: str, dtype: torch.dtype, masks: dict, bias_grad: bool = True, **options
) -> None:
    """The rule: at most twice the error of the dense computation in the same dtype, against float64."""
    i = rounded(i, dtype)
    truth = evaluate(i, kind, "reference", torch.float64, masks, bias_grad)
    dense = evaluate(i, kind, "reference", dtype, masks, bias_grad)
    got = evaluate(i, kind, impl, dtype, masks, bias_grad, **options)
    summed = {"slope": slope_magnitude(i, kind, masks)} if "slope" in truth else {}
    compare(truth, dense, got, dtype, f"{kind} by {impl}", summed)


def slope_magnitude(i: Inputs, kind: str, masks: dict) -> Tensor:
    """sum over pairs of |dS| |b / slope|, for each head: what the slope's gradient is a signed sum of."""
    bias = BIASES[kind](i).dense()
    assert bias is not None
    step = torch.zeros(i["q"].shape[0], *bias.shape[1:], dtype=torch.float64, requires_grad=True)
    whole = TileBias(lambda *_: bias + step, {}, {})
    y = attend(i["q"], i["k"], i["v"], bias=whole, impl="reference", **masks)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (y * weight).sum().backward()
    assert step.grad is not None
    return (step.grad * bias / i["slope"].unsqueeze(-1)).abs().sum((0, 2, 3))


def compare(
    truth: dict[str, Tensor],
    dense: dict[str, Tensor],
    got: dict[str, Tensor],
    dtype: torch.dtype,
    what: str,
    summed: dict[str, Tensor] | None = None,
) -> None:
    assert got.keys() == truth.keys(), f"{what}: gradients of {sorted(got)} instead of {sorted(truth)}"
    for name, right in truth.items():
        nought = right == 0
        stray = got[name][nought].abs().amax() if bool(nought.any()) else torch.zeros(())
        assert stray <= FLOOR[dtype], f"{what}, {name}: {stray:.2e} where it should be 0"
        apart, known = (x.masked_fill(nought, 0.0) for x in (got[name] - right, dense[name] - right))
        allowed = 2 * known.norm() + FLOOR[dtype] + RELATIVE[dtype] * right.norm()
        if summed and name in summed:
            allowed = allowed + ULPS * torch.finfo(dtype).eps * summed[name].norm()
        error = apart.norm()
        assert error <= allowed, f"{what}, {name}: error {error:.2e}, allowed {allowed:.2e}"


def by_mask(q: Tensor, k: Tensor, v: Tensor, bias: Bias, causal: bool) -> Tensor:
    """Torch's attention with the bias as a dense mask in q's own dtype."""
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=torch.float64)
    if causal:
        mask = mask.masked_fill(
            torch.ones_like(mask, dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2]), -torch.inf
        )
    dense = bias.dense()
    mask = mask if dense is None else mask + dense.double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=True)
