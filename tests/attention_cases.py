"""What the attention tests share: biases of every kind, evaluation with all gradients, one tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from grape_pe.attention import attend
from grape_pe.bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, TileBias

#: The rule (docs/attention.md): an error, in norm over a tensor, is at most so many times that of the dense
#: computation in the same dtype, or so much of the tensor's own norm, whichever is larger.
TIMES = {torch.float64: 0.0, torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2.0}
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5}
#: or so much for each number: where a gradient is zero by cancellation, the dense error may be zero too
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}

#: Some gradients are a handful of numbers (a slope has one for each head). Then the dense error of one draw
#: says little: it may be near zero by luck. More draws of q, k, v and of the loss are joined to it.
MORE_DRAWS = 8

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

    # positions: a sequence that starts late, and one with a gap
    places = torch.arange(max(keys, queries), dtype=torch.float64).expand(batch, 1, -1) + 1000.0
    places = places + 40.0 * (places > 1000 + keys // 3) * torch.arange(batch).view(-1, 1, 1)
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
        "n_q": places[..., rows:] if queries <= keys else places,
        "n_k": places[..., :keys],
        "table": normal(1, heads, 1, 3, 48),
        "mix": normal(batch, heads, queries, 3),
    }


def _radial(rows: slice, cols: slice, query: dict[str, Tensor], key: dict[str, Tensor]) -> Tensor:
    apart = query["x"][:, :, rows].unsqueeze(3) - key["x"][:, :, cols].unsqueeze(2)
    return -query["w"] * (apart.square().sum(-1) + 1.0).sqrt()


def _slope(i: Inputs, rate_q: str | None, rate_k: str | None) -> SlopeBias:
    pick = (i[name] if name else None for name in (rate_q, rate_k))
    return SlopeBias((SlopeTerm(i["c_q"], i["c_k"], *pick),))


def _walk(i: Inputs) -> SlopeBias:
    """A coordinate that wanders, with rates of both sides: far keys hold rows."""
    queries, keys = i["q"].shape[2], i["k"].shape[2]
    c_q = i["d_k"][..., keys - queries :] if queries <= keys else i["d_q"]
    return SlopeBias((SlopeTerm(2 * c_q, 2 * i["d_k"], 2 * i["slope"], 2 * i["rate_k"]),))


def _alibi(i: Inputs) -> SlopeBias:
    queries, keys = i["q"].shape[2], i["k"].shape[2]
    at = torch.arange(max(queries, keys), dtype=torch.float64).view(1, 1, -1)
    return SlopeBias((SlopeTerm(at[..., at.shape[-1] - queries :], at[..., :keys], i["slope"].detach()),))


def _table(i: Inputs, mixed: bool, first: int, beyond: str) -> DistanceBias:
    weight, heads = (i["mix"], slice(None)) if mixed else (None, slice(0, 1))
    return DistanceBias(i["n_q"], i["n_k"], i["table"][:, heads], weight, first, beyond)


def _kernel(distance: Tensor, numbers: Tensor) -> Tensor:
    """-r1 log(1 + r2 |d|), signs kept apart."""
    r1, r2 = (numbers[..., i].exp()[(..., *(None,) * distance.dim())] for i in range(2))
    return -r1 * torch.log1p((r2 + 0.1 * (distance < 0)) * distance.abs().to(numbers.dtype))


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
    "walk": _walk,
    "path": lambda i: PathBias(i["probe_q"], i["probe_k"], i["slope"]),
    "bounded": lambda i: PathBias(i["probe_q"], i["probe_k"], i["slope"], "bounded"),
    "slope+path": lambda i: _slope(i, "rate_q", None) + PathBias(i["probe_q"], i["probe_k"], i["slope"]),
    "table": lambda i: _table(i, False, -20, "last"),
    "mixed": lambda i: _table(i, True, 0, "zero"),
    "cut": lambda i: _table(i, True, -30, "-inf") + _slope(i, "rate_q", None),
    "profile": lambda i: DistanceBias(i["n_q"], i["n_k"], i["table"][..., :2], profile=_kernel),
    "tile": lambda i: TileBias(_radial, {"x": i["x_q"], "w": i["slope"].unsqueeze(-1)}, {"x": i["x_k"]}),
}
SLOPES = ("none", "alibi", "fox", "a-q", "a-k", "a-qk", "terms", "walk")


def cast(i: Inputs, dtype: torch.dtype, grad: bool = True) -> Inputs:
    """To a dtype; coordinates stay float64 and rates at least float32, as encodings make them."""

    def one(name: str, x: Tensor) -> Tensor:
        if name[:2] == "n_":
            return x
        if name[:2] in ("c_", "d_"):
            return x.detach().clone().requires_grad_(grad)
        wide = name in ("slope", "rate_q", "rate_k", "table", "mix") or name.startswith(("probe", "x_"))
        to = torch.promote_types(dtype, torch.float32) if wide else dtype
        return x.detach().to(to).requires_grad_(grad)

    return {name: one(name, x) for name, x in i.items()}


def evaluate(
    i: Inputs,
    kind: str,
    impl: str,
    dtype: torch.dtype,
    masks: dict,
    bias_grad: bool = True,
    draw: int = 0,
    **options,
) -> dict[str, Tensor]:
    """The output and the gradient of every input that has one, in float64."""
    leaves = cast(i, dtype)
    traces = leaves if bias_grad else {name: x.detach() for name, x in leaves.items()}
    bias = BIASES[kind]({**traces, **{name: leaves[name] for name in "qkv"}})
    y = attend(leaves["q"], leaves["k"], leaves["v"], bias=bias, impl=impl, **masks, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7 + draw), dtype=torch.float64)
    (y.double() * weight).sum().backward()
    found = {name: x.grad.double() for name, x in leaves.items() if x.grad is not None}
    return {"y": y.detach().double(), **found}


def rounded(i: Inputs, dtype: torch.dtype) -> Inputs:
    """Numbers the dtype can hold, in float64: what every implementation is given."""
    return {name: x.detach().double() for name, x in cast(i, dtype, grad=False).items()}


def redrawn(i: Inputs, draw: int) -> Inputs:
    """The same bias over other q, k, v; draw 0 is the inputs as they are."""
    if draw == 0:
        return i
    g = torch.Generator().manual_seed(1000 + draw)
    return {**i, **{name: torch.randn(i[name].shape, generator=g, dtype=torch.float64) for name in "qkv"}}


#: for each tensor squared norms: of the error, and of the largest error the rule allows
Errors = dict[str, tuple[float, float]]


def assert_accurate(
    i: Inputs,
    kind: str,
    impl: str,
    dtype: torch.dtype,
    masks: dict,
    bias_grad: bool = True,
    **options,
) -> None:
    """The rule for the output and for each gradient.

    If one of them breaks it, that draw and MORE_DRAWS others are judged together, by norms over all of them.
    """
    what = f"{kind} by {impl} in {dtype}"

    def errors(draw: int) -> Errors:
        drawn = rounded(redrawn(i, draw), dtype)
        truth = evaluate(drawn, kind, "reference", torch.float64, masks, bias_grad, draw)
        dense = evaluate(drawn, kind, "reference", dtype, masks, bias_grad, draw)
        got = evaluate(drawn, kind, impl, dtype, masks, bias_grad, draw, **options)
        return errors_of(truth, dense, got, what, dtype)

    assert_rule(errors, what)


def assert_rule(errors: Callable[[int], Errors], what: str) -> None:
    """The rule for draw 0 or, if that breaks it, for all draws together."""
    found = errors(0)
    if broken(found):
        more = [found, *(errors(draw) for draw in range(1, 1 + MORE_DRAWS))]
        found = {name: tuple(map(sum, zip(*(one[name] for one in more), strict=True))) for name in found}
    assert not broken(found), f"{what}: {broken(found)}"


def errors_of(
    truth: dict[str, Tensor],
    dense: dict[str, Tensor],
    got: dict[str, Tensor],
    what: str,
    dtype: torch.dtype,
) -> Errors:
    assert got.keys() == truth.keys(), f"{what}: gradients of {sorted(got)} instead of {sorted(truth)}"

    def one(name: str, right: Tensor) -> tuple[float, float]:
        known = TIMES[dtype] * float((dense[name] - right).norm())
        least = RELATIVE.get(dtype, 0.0) * float(right.norm()) + FLOOR[dtype] * right.numel() ** 0.5
        return float((got[name] - right).norm()) ** 2, max(known, least) ** 2

    return {name: one(name, right) for name, right in truth.items()}


def broken(errors: Errors) -> str:
    """The tensors that break the rule, with their error and what is allowed."""
    bad = [(name, *pair) for name, pair in errors.items() if not pair[0] <= pair[1]]
    return ", ".join(f"{name}: error {ours**0.5:.2e}, allowed {most**0.5:.2e}" for name, ours, most in bad)


def compare(
    truth: dict[str, Tensor],
    dense: dict[str, Tensor],
    got: dict[str, Tensor],
    what: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The rule, for one draw."""
    found = errors_of(truth, dense, got, what, dtype)
    assert not broken(found), f"{what}: {broken(found)}"
