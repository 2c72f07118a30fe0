"""Pruning: it skips something, it changes nothing, and it knows when it must not."""

from __future__ import annotations

import pytest
import torch

from attention_cases import evaluate, inputs, one_thread, rounded  # noqa: F401
from grape_pe.attention import attend, pruning, record_pruning
from grape_pe.attention.cpu import build as native
from grape_pe.bias import NoBias, PathBias, SlopeBias, SlopeTerm

LENGTH = 1500
SHAPE = {"batch": 1, "heads": 3, "kv_heads": 3}


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    elif not native.available():
        pytest.skip(str(native.why_not()))
    return request.param


def both(kind: str, masks: dict, dtype: torch.dtype = torch.float32):
    """With and without pruning, and the fraction skipped."""
    i = inputs(LENGTH, **SHAPE)
    i = rounded({**i, "rate_q": i["rate_q"] + 0.3}, dtype)  # one flat row keeps a whole tile
    full = evaluate(i, kind, "blockwise", dtype, masks, prune=None)
    with record_pruning() as report:
        cut = evaluate(i, kind, "blockwise", dtype, masks)
    return full, cut, report.fraction


@pytest.mark.parametrize("kind", ("alibi", "fox", "a-q", "a-qk", "path", "slope+path"))
@pytest.mark.parametrize("mask", ("causal", "padding", "documents"))
def test_pruned_equals_unpruned(kernel, kind, mask):
    masks = {
        "causal": {},
        "padding": {"key_padding": (torch.arange(LENGTH) < 100)[None]},
        "documents": {"documents": torch.arange(LENGTH) // 700},
    }[mask]
    full, cut, fraction = both(kind, masks)
    if kernel == "native" or kind not in ("path", "slope+path"):
        assert fraction > 0.1, f"only {fraction:.1%} skipped"
    for name, right in full.items():
        apart = (cut[name] - right).norm()
        # rounding of the dtype, at the size of the whole tensor
        assert apart <= 4 * torch.finfo(torch.float32).eps * right.norm() + 2e-6, name


def test_unpruned_skips_nothing():
    i = inputs(LENGTH, **SHAPE)
    with record_pruning() as report:
        evaluate(i, "alibi", "blockwise", torch.float32, {}, prune=None)
    assert report.visible > 0
    assert report.fraction == 0.0


def test_a_smaller_threshold_skips_more():
    i, fractions = inputs(LENGTH, **SHAPE), []
    for prune in ("auto", 5.0, 1.0):
        with record_pruning() as report:
            evaluate(i, "alibi", "blockwise", torch.float32, {}, prune=prune)
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
def test_what_must_not_be_pruned(kernel, kind):
    """Each of these puts the row's weight at the far end, where a careless bound would not look."""
    far = {"large key": 300.0, "coordinate that returns": 50.0}.get(kind, 0.5)
    q, k, v, bias = decoy(kind, far)
    right = attend(*(x.double() for x in (q, k, v)), bias=bias, impl="reference")
    got = attend(q, k, v, bias=bias, impl="blockwise")
    near = attend(q, k, v, bias=bias, impl="blockwise", window=600)
    assert (near[0, 0, -1] - right[0, 0, -1]).norm() > 0.1, (
        "the decoy draws no weight: the test shows nothing"
    )
    torch.testing.assert_close(got.double()[0, 0, -1], right[0, 0, -1], atol=1e-3, rtol=1e-3)


def test_padding_hides_the_nearest_key(kernel):
    """A row whose own neighbourhood is padding must still find the keys far away."""
    i = rounded(inputs(LENGTH, **SHAPE), torch.float32)
    padding = torch.ones(1, LENGTH, dtype=torch.bool)
    padding[0, :20] = False
    truth = evaluate(i, "alibi", "reference", torch.float64, {"key_padding": padding})
    got = evaluate(i, "alibi", "blockwise", torch.float32, {"key_padding": padding})
    assert truth["y"][0, :, -1].norm() > 0.1
    torch.testing.assert_close(got["y"], truth["y"], atol=1e-4, rtol=1e-4)


def test_not_a_number_is_never_skipped(kernel):
    for tensor in range(3):
        q, k, v, bias = decoy("large key", 0.0)
        (q, k, v)[tensor][0, 0, 3 if tensor else -1] = torch.nan
        assert attend(q, k, v, bias=bias, impl="blockwise")[0, 0, -1].isnan().any()


def test_threshold_bounds_what_is_dropped():
    """keys * (1 + reach) * e^-tau is at most half the spacing of the dtype."""
    for keys, reach in ((64, 0.0), (4096, 4096.0), (1 << 17, 1e6)):
        for dtype in (torch.float32, torch.float64):
            tau = torch.tensor(pruning.threshold(pruning.AUTO, keys, dtype, reach), dtype=torch.float64)
            assert keys * (1 + reach) * torch.exp(-tau) <= torch.finfo(dtype).eps / 2 * 1.000001


def test_bound_holds_for_random_signs():
    """No logit exceeds its tile's bound, whatever the signs of rates and the order of coordinates."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1, 1, 130, 8, generator=g, dtype=torch.float64) for _ in range(2))
        c, rate_q, rate_k = (3 * torch.randn(1, 1, 130, generator=g, dtype=torch.float64) for _ in range(3))
        bias = SlopeBias((SlopeTerm(c, c, rate_q, rate_k),))
        logits = q @ k.transpose(-1, -2) + bias.dense()
        tiles = pruning.slope_bounds(c[None], rate_k[None], 64)
        slopes = (c[None, :, 0], rate_q[None, :, 0], tiles.select(0, slice(None)))
        bound = pruning.logit_bounds(q.norm(dim=-1)[:, 0], pruning.key_bounds(k, k, 64)[:, 0], slopes)
        worst = (
            torch.nn.functional.pad(logits[:, 0], (0, 62), value=-torch.inf).unflatten(-1, (3, 64)).amax(-1)
        )
        assert (worst <= bound).all()


def test_no_bias_is_left_alone():
    q, k, v, _ = decoy("large key", 1.0)
    with record_pruning() as report:
        attend(q, k, v, bias=NoBias(), impl="blockwise")
    assert report.fraction == 0.0
    assert "0.0% of" in str(report)
