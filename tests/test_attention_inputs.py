"""What users hand to `attend` by mistake or at the edge: refused with the reason, or computed right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import grape_pe as grape
from attention_cases import BIASES, cast, inputs, one_thread  # noqa: F401
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native
from grape_pe.bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias

T, HEADS = 70, 4


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(batch: int = 1, length: int = T, width: int = 16) -> list[Tensor]:
    return [tokens(batch, HEADS, length, width, seed=seed) for seed in range(3)]


def position(length: int = T) -> Tensor:
    return torch.arange(length, dtype=torch.float64)[None, None]


def slope(heads: int = HEADS, rate: float = 0.5) -> SlopeBias:
    return SlopeBias((SlopeTerm(position(), position(), torch.full((1, heads, 1), rate)),))


def path(q: tuple[int, ...], k: tuple[int, ...], heads: int = HEADS) -> PathBias:
    return PathBias(tokens(*q), tokens(*k), torch.full((1, heads, 1), 0.1))


WRONG: dict[str, tuple[Bias, str]] = {
    "probe heads that do not divide": (path((1, 3, T, 8), (1, 3, T, 8)), "must divide the 4 query heads"),
    "fewer heads of key probes": (path((1, 4, T, 8), (1, 1, T, 8)), r"probe_k .* \(1, 4, 70, 8\)"),
    "features that differ": (path((1, 4, T, 8), (1, 4, T, 40)), "probe_k"),
    "probes of another batch": (path((3, 4, T, 8), (3, 4, T, 8)), "probe_q"),
    "a path of another length in a sum": (slope() + path((1, 4, 3, 8), (1, 4, 3, 8)), "is for 3 queries"),
    "rates of other heads": (slope(heads=3), r"rate_q .* got \(1, 3, 1\)"),
    "a path's rates of other heads": (path((1, 4, T, 8), (1, 4, T, 8), heads=2), "rate of the bias"),
    "a rate without an axis": (SlopeBias((SlopeTerm(position(), position(), torch.ones(4, 1)),)), "rate_q"),
}


@pytest.mark.parametrize("impl", ("auto", "cpu", "reference"))
@pytest.mark.parametrize("name", WRONG)
def test_a_bias_that_does_not_fit_is_refused(name, impl):
    bias, reason = WRONG[name]
    with pytest.raises(ValueError, match=reason):
        attend(*qkv(), bias=bias, impl=impl)


def test_an_unknown_link_is_refused():
    with pytest.raises(ValueError, match=r'link must be "logsigmoid" or "bounded", got .Bounded.'):
        PathBias(tokens(1, 4, T, 8), tokens(1, 4, T, 8), torch.ones(1, 4, 1), link="Bounded")


@pytest.mark.parametrize("name", ("k", "v", "documents", "key_padding", "key_bound", "bias"))
def test_a_tensor_elsewhere_is_refused(name):
    q, k, v = qkv()
    given = {"k": k, "v": v, "documents": torch.zeros(T, dtype=torch.long), "bias": slope()}
    given |= {"key_padding": torch.zeros(1, T, dtype=torch.bool), "key_bound": torch.ones(1, HEADS)}
    moved = given[name].map(lambda x: x.to("meta")) if name == "bias" else given[name].to("meta")
    arguments = {"k": k, "v": v, name: moved}
    with pytest.raises(ValueError, match=r"on meta but q is on cpu"):
        attend(q, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"window": 2.5}, ValueError, "integer of at least 1"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a number, got Tensor; multiply q"),
        ({"scale": "0.1"}, TypeError, "scale must be a number, got str"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
        ({"causal": torch.ones(T, T)}, TypeError, "causal must be True or False, got Tensor"),
        ({"causal": "no"}, TypeError, "causal must be True or False, got str"),
        ({"prune": [1]}, ValueError, "positive distance"),
        ({"documents": torch.zeros(T, dtype=torch.complex64)}, ValueError, "integer ids"),
        ({"documents": torch.zeros(T, dtype=torch.uint64)}, ValueError, "integer ids"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        attend(*qkv(), **options)


def test_what_is_no_tensor_is_refused():
    q, k, _ = qkv()
    with pytest.raises(TypeError, match=r"v must be a torch.Tensor, got list"):
        attend(q, k, [1.0])


@pytest.mark.parametrize("impl", ("cpu", "decode", "blocks", "sdpa"))
@pytest.mark.parametrize("name", ("q", "k", "v", "bias"))
def test_a_negation_left_to_do_is_done(impl, name):
    """Such as the imaginary part of a conjugate: its memory holds the numbers before the negation."""
    if impl == "cpu" and not native.available():
        pytest.skip(str(native.why_not()))
    if (impl, name) == ("sdpa", "bias"):
        pytest.skip("it takes no bias")
    queries = 3 if impl == "decode" else T
    q, k, v = qkv()
    given = {"q": q[:, :, -queries:], "k": k, "v": v}
    rate = torch.full((1, HEADS, 1), 0.5)

    def attended(change, impl: str) -> Tensor:
        bias = SlopeBias((SlopeTerm(position()[..., -queries:], position(), rate),))
        if name == "bias":
            bias = bias.replaced({"0.rate_q": change(rate)})
        each = [change(x) if name == which else x for which, x in given.items()]
        return attend(*each, bias=None if impl == "sdpa" else bias, impl=impl)

    negated = attended(lambda x: torch._neg_view(-x), impl)
    assert torch.equal(negated, attended(lambda x: x, impl))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("impl", ("auto", "cpu"))
@pytest.mark.parametrize("window", (2**31 - 1, 2**31, 2**33, sys.maxsize))
def test_a_window_larger_than_everything_is_none(window, impl):
    close(
        attend(*qkv(), bias=slope(), window=window, impl=impl), attend(*qkv(), bias=slope(), impl="reference")
    )


@pytest.mark.parametrize("least", (-(2**63), -(2**31) - 1, 2**62))
def test_ids_of_any_size(least):
    ids = torch.where(torch.arange(T) < 30, least, 0)
    close(attend(*qkv(), documents=ids), attend(*qkv(), documents=ids, impl="reference"))


@pytest.mark.parametrize("impl", ("auto", "cpu"))
def test_an_infinite_coordinate_switches_a_key_off(impl):
    c = position().clone()
    c[..., 20] = -torch.inf
    bias = SlopeBias((SlopeTerm(position(), c, torch.full((1, HEADS, 1), 0.5)),))
    want = attend(*qkv(), bias=bias, impl="reference")
    assert want[:, :, :20].isfinite().all()
    close(attend(*qkv(), bias=bias, impl=impl), want)


def test_an_infinite_probe_ends_the_path():
    probe = tokens(1, HEADS, T, 8).abs()
    probe[:, :, 30, 0] = -torch.inf
    bias = PathBias(tokens(1, HEADS, T, 8, seed=1).abs(), probe, torch.full((1, HEADS, 1), 0.1))
    want = attend(*qkv(), bias=bias, impl="reference")
    assert want.isfinite().all()
    close(attend(*qkv(), bias=bias), want)


@pytest.mark.parametrize("name", ("alibi", "fox", "grape-a-qk", "grape-ap", "rope"))
@pytest.mark.parametrize("keys", (0, 5))
def test_no_tokens(name, keys):
    encoding = grape.build(name, heads=HEADS, head_dim=16, width=32)
    some = tokens(2, HEADS, keys, 16)
    code = encoding(some, some, x=tokens(2, keys, 32))
    bias = code.bias.queries(slice(keys, None)) if keys else code.bias
    assert attend(code.q[:, :, keys:], code.k, some, bias=bias).shape == (2, HEADS, 0, 16)


@pytest.mark.parametrize("impl", ("auto", "cpu", "blocks", "sdpa"))
def test_no_features_weigh_all_keys_alike(impl):
    _, _, v = qkv()
    empty = torch.zeros(1, HEADS, T, 0)
    close(attend(empty, empty, v, impl=impl)[:, :, -1], v.mean(2))


@pytest.mark.parametrize("impl", ("auto", "cpu"))
def test_forward_mode_is_right_or_refused(impl):
    q, k, v = qkv()

    def derivative(impl: str) -> Tensor:
        return torch.func.jvp(lambda x: attend(x, k, v, bias=slope(), impl=impl), (q,), (q,))[1]

    if impl == "auto":
        torch.testing.assert_close(derivative(impl), derivative("reference"))
    else:
        with pytest.raises(ValueError, match=r"torch\.func.*these can: reference"):
            derivative(impl)


def test_a_term_alone_and_a_sum_with_nothing():
    want = attend(*qkv(), bias=slope(), impl="reference")
    close(attend(*qkv(), bias=slope().terms[0]), want)
    close(attend(*qkv(), bias=SumBias((NoBias(), slope())), impl="reference"), want)


def test_a_cache_needs_no_home(tmp_path):
    if not native.available():
        pytest.skip(str(native.why_not()))
    code = (
        "import pathlib\n"
        "def nowhere(*_): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = nowhere\n"
        "from grape_pe.attention import folder\n"
        "print(folder.cache_directory())\n"
    )
    env = {**os.environ, "GRAPE_PE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path), done.stderr


SURROUNDED = [("cpu", "slope+path"), ("cpu", "a-qk"), ("blocks", "slope+path"), ("reference", "tile")]
SURROUNDED += [("sdpa", "none"), ("decode", "a-qk")]


@pytest.mark.parametrize("impl, kind", SURROUNDED)
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16, torch.float16, "meta"), ids=str)
def test_torchs_defaults_change_nothing(impl, kind, default):
    """Every buffer takes dtype and device from its tensors: a float32 call is the same under any default."""
    if impl == "cpu" and not native.available():
        pytest.skip(str(native.why_not()))

    def run(change: bool) -> list[Tensor]:
        i = cast(inputs(150, 3 if impl == "decode" else None, batch=1), torch.float32, grad=impl != "decode")
        bias = BIASES[kind](i)
        try:
            if change:
                (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
            y = attend(i["q"], i["k"], i["v"], bias=bias, impl=impl)
            if impl != "decode":
                y.square().sum().backward()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        return [y.detach(), *(x.grad for x in i.values() if x.grad is not None)]

    for want, got in zip(run(False), run(True), strict=True):
        assert torch.equal(want, got)
