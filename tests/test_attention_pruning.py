"""Pruning: it skips something, it changes nothing, and it knows when it must not."""

from __future__ import annotations

import math

import pytest
import torch

from attention_cases import BIASES, cast, evaluate, inputs, one_thread, rounded  # noqa: F401
from grape_pe.attention import attend, key_bound, pruning, record_pruning
from grape_pe.attention.cpu import build as native
from grape_pe.attention.masks import Masks
from grape_pe.attention.problem import AttentionProblem
from grape_pe.bias import NoBias, PathBias, SlopeBias, SlopeTerm

LENGTH = 1500
SHAPE = {"batch": 1, "heads": 3, "kv_heads": 3}


pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


def both(kind: str, masks: dict, dtype: torch.dtype = torch.float32):
    """With and without pruning, and the fraction skipped."""
    i = inputs(LENGTH, **SHAPE)
    i = rounded({**i, "rate_q": i["rate_q"] + 0.3}, dtype)  # one flat row keeps a whole tile
    full = evaluate(i, kind, "cpu", dtype, masks, prune=None)
    with record_pruning() as report:
        cut = evaluate(i, kind, "cpu", dtype, masks)
    return full, cut, report.fraction


@pytest.mark.parametrize("kind", ("alibi", "fox", "a-q", "a-qk", "path", "slope+path"))
@pytest.mark.parametrize("mask", ("causal", "padding", "documents"))
def test_pruned_equals_unpruned(kind, mask):
    masks = {
        "causal": {},
        "padding": {"key_padding": (torch.arange(LENGTH) < 100)[None]},
        "documents": {"documents": torch.arange(LENGTH) // 700},
    }[mask]
    full, cut, fraction = both(kind, masks)
    assert fraction > 0.1, f"only {fraction:.1%} skipped"
    for name, right in full.items():
        apart = (cut[name] - right).norm()
        # rounding of the dtype, at the size of the whole tensor
        assert apart <= 4 * torch.finfo(torch.float32).eps * right.norm() + 2e-6, name


def test_long_query_probes_prune_exactly():
    """Nothing bounds an edge of grape-ap: probes thirty times as long, edges of hundreds of nats."""
    i = inputs(LENGTH, **SHAPE)
    i = rounded({**i, "probe_q": 30 * i["probe_q"]}, torch.float32)
    full = evaluate(i, "path", "cpu", torch.float32, {}, prune=None)
    with record_pruning() as report:
        cut = evaluate(i, "path", "cpu", torch.float32, {})
    assert report.fraction > 0.1
    for name, right in full.items():
        assert (cut[name] - right).norm() <= 4 * torch.finfo(torch.float32).eps * right.norm() + 2e-6, name


def test_unpruned_skips_nothing():
    i = inputs(LENGTH, **SHAPE)
    with record_pruning() as report:
        evaluate(i, "alibi", "cpu", torch.float32, {}, prune=None)
    assert report.visible > 0
    assert report.fraction == 0.0


def test_a_smaller_threshold_skips_more():
    i, fractions = inputs(LENGTH, **SHAPE), []
    for prune in ("auto", 5.0, 1.0):
        with record_pruning() as report:
            evaluate(i, "alibi", "cpu", torch.float32, {}, prune=prune)
        fractions.append(report.fraction)
    assert fractions == sorted(fractions)
    assert fractions[0] < fractions[-1]


def decoy(kind: str, far: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
    """A key at the far end, all the weight of which comes through `far`."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, LENGTH, 16, generator=g) for _ in range(3))
    at = torch.arange(LENGTH, dtype=torch.float64).view(1, 1, -1)
    if kind == "large key":
        k[0, 0, 3] = far * q[0, 0, -1]
        return q, k, v, SlopeBias((SlopeTerm(at, at, torch.full((1, 1, 1), 0.5)),))
    if kind == "negative rate":
        return q, k, v, SlopeBias((SlopeTerm(at, at, torch.full((1, 1, 1), -far)),))
    if kind == "negative key rate":
        rate = torch.full((1, 1, LENGTH), 0.5)
        rate[..., 3] = -far
        return q, k, v, SlopeBias((SlopeTerm(at, at, None, rate),))
    if kind == "coordinate that returns":
        back = at.clone()
        back[..., 3] = LENGTH + far
        return q, k, v, SlopeBias((SlopeTerm(at, back, torch.full((1, 1, 1), 0.5)),))
    probes = torch.randn(2, 1, 1, LENGTH, 4, generator=g)
    return q, k, v, PathBias(probes[0], probes[1], torch.full((1, 1, 1), -far))


@pytest.mark.parametrize(
    "kind", ("large key", "negative rate", "negative key rate", "coordinate that returns", "negative path")
)
def test_what_must_not_be_pruned(kind):
    """Each of these puts the row's weight at the far end, where a careless bound would not look."""
    far = {"large key": 300.0, "coordinate that returns": 50.0}.get(kind, 0.5)
    q, k, v, bias = decoy(kind, far)
    right = attend(*(x.double() for x in (q, k, v)), bias=bias, impl="reference")
    got = attend(q, k, v, bias=bias, impl="cpu")
    near = attend(q, k, v, bias=bias, impl="cpu", window=600)
    assert (near[0, 0, -1] - right[0, 0, -1]).norm() > 0.1, (
        "the decoy draws no weight: the test shows nothing"
    )
    torch.testing.assert_close(got.double()[0, 0, -1], right[0, 0, -1], atol=1e-3, rtol=1e-3)


def test_padding_hides_the_nearest_key():
    """A row whose own neighbourhood is padding must still find the keys far away."""
    i = rounded(inputs(LENGTH, **SHAPE), torch.float32)
    padding = torch.ones(1, LENGTH, dtype=torch.bool)
    padding[0, :20] = False
    truth = evaluate(i, "alibi", "reference", torch.float64, {"key_padding": padding})
    got = evaluate(i, "alibi", "cpu", torch.float32, {"key_padding": padding})
    assert truth["y"][0, :, -1].norm() > 0.1
    torch.testing.assert_close(got["y"], truth["y"], atol=1e-4, rtol=1e-4)


def test_not_a_number_is_never_skipped():
    for tensor in range(3):
        q, k, v, bias = decoy("large key", 0.0)
        (q, k, v)[tensor][0, 0, 3 if tensor else -1] = torch.nan
        assert attend(q, k, v, bias=bias, impl="cpu")[0, 0, -1].isnan().any()


@pytest.mark.parametrize("kind", ("alibi", "fox", "path", "slope+path"))
@pytest.mark.parametrize("learns", (False, True))
def test_threshold_bounds_what_is_dropped(kind, learns):
    """keys (1 + reach) e^-tau is half the spacing of float32; reach is the span of c and a path's edges' bound."""
    i = cast(inputs(700, **SHAPE), torch.bfloat16, grad=learns)
    masks = Masks(700, 700, torch.device("cpu"))
    p = AttentionProblem.build(i["q"], i["k"], i["v"], BIASES[kind](i), masks, 1.0, "auto")
    assert p.bias_learns == (learns and kind != "alibi")
    reach = 0.0
    if p.bias_learns:
        c = torch.cat([x.flatten() for x in (p.c_q, p.c_k) if x is not None] or [torch.zeros(1)])
        reach = (c.max() - c.min()).item()
        if p.probe_q is not None:
            longest = p.probe_q.norm(dim=-1).max() * p.probe_k.norm(dim=-1).max() / p.probe_q.shape[-1]
            reach += 700 * (1 + longest.item())
    tau = pruning.tau(p)
    assert tau.dtype == torch.float32 and tau.dim() == 0
    assert 700 * (1 + reach) * math.exp(-tau.item()) == pytest.approx(2.0**-24, rel=1e-4)


def test_a_key_bound_is_an_upper_bound_in_every_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for seed in range(20):
            k = torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
            assert (key_bound(k).double() >= k.double().norm(dim=-1).amax(-1)).all()


def test_a_key_bound_rounded_down_still_bounds():
    """A cache may keep the norm in bfloat16, 0.4% below the true one: decoding must not skip that key."""
    q = torch.zeros(1, 1, 1, 8)
    q[..., 0] = 300.0
    k, v = torch.zeros(2, 1, 1, 3000, 8).unbind(0)
    k[0, 0, :, 0] = 1.0
    k[0, 0, 0, 0] = 1.9970703125  # its bfloat16 neighbours are 1.9921875 and 2
    v[0, 0, 0] = 1.0
    at = torch.arange(3000, dtype=torch.float64).view(1, 1, -1)
    bias = SlopeBias((SlopeTerm(at[..., -1:], at, torch.full((1, 1, 1), 0.0997)),))
    bound = torch.full((1, 1), 1.9921875, dtype=torch.bfloat16)
    right = attend(q, k, v, bias=bias, scale=1.0, impl="reference")
    got = attend(q, k, v, bias=bias, scale=1.0, impl="decode", key_bound=bound)
    torch.testing.assert_close(got, right)


def test_no_bias_is_left_alone():
    q, k, v, _ = decoy("large key", 1.0)
    with record_pruning() as report:
        attend(q, k, v, bias=NoBias(), impl="cpu")
    assert report.fraction == 0.0
    assert "0.0% of" in str(report)
