"""Gates, angles, rotations and biases have the same precision under any autocast and default dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import grape_pe as grape
from grape_pe.encodings import Encoded, Encoding
from grape_pe.encodings.base import NoPE
from grape_pe.groups import (
    BasisRotation,
    DenseRotation,
    JointMixtureRotation,
    MixtureRotation,
    PlaneRotation,
    Rank2Rotation,
    orthogonal_from,
    orthonormal_columns,
    skew_from_pairs,
)
from grape_pe.precision import WideLinear
from grape_pe.testing import sample

CASES = [
    *[(name, {}) for name in grape.encodings.names()],
    ("rope+fox", {}),
    ("grape-m-basis+grape-ap", {}),
    ("grape-m-ctx+grape-a-qk+grape-a-phase", {}),
    ("grape-m", {"coords": 2, "axes": "mixed"}),
    ("grape-m-basis", {"basis": "unitary", "basis_per_head": True}),
    ("grape-m-mix", {"coords": 2}),
    ("liere", {"coords": 3}),
    ("alibi", {"coords": 2, "metric": "radial"}),
    ("grape-ap", {"probe": "k", "probe_rotation": "relative"}),
]
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built(name: str, options: dict) -> Encoding:
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, kv_heads=2, head_dim=10, width=16, **options)
    with torch.no_grad():  # away from where they start: a basis of zeros would round to nothing
        for parameter in enc.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype))
    return enc


def tensors(code: Encoded) -> dict[str, Tensor]:
    states = code.state if isinstance(code.state, tuple) else (code.state,)
    carried = {f"state {i}": s for i, s in enumerate(states) if s is not None}
    bias = code.bias.dense()
    dense = {} if bias is None else {"bias": bias}
    return {
        "q": code.q,
        "k": code.k,
        **dense,
        **carried,
        **code.bias.query_tensors(),
        **code.bias.key_tensors(),
    }


def encode(enc: Encoding, dtype: torch.dtype, x_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    data = sample(enc, tokens=40, dtype=dtype)
    x = None if data.x is None or x_dtype is None else data.x.to(x_dtype)
    code = enc(data.q, data.k, x=data.x if x is None else x, v=data.v, positions=data.positions)
    return tensors(code)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, options", CASES)
def test_autocast_changes_no_bit(name: str, options: dict, dtype: torch.dtype, half: torch.dtype) -> None:
    enc = built(name, options)
    plain = encode(enc, dtype)
    with torch.autocast("cpu", half):
        assert_same(encode(enc, dtype), plain)


@pytest.mark.parametrize("name, options", CASES)
def test_autocast_changes_no_gradient(name: str, options: dict) -> None:
    enc, twin = built(name, options), built(name, options)

    def loss(enc: Encoding) -> Tensor:
        found = encode(enc, torch.float32)
        return sum(t.float().square().sum() for n, t in found.items() if n in ("q", "k", "bias"))

    plain = loss(twin)
    with torch.autocast("cpu", torch.bfloat16):
        total = loss(enc)
    for each in (plain, total):
        if each.requires_grad:
            each.backward()
    for (name, ours), theirs in zip(enc.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("name, options", CASES)
def test_bias_tiles_and_rebased_keys_under_autocast(name: str, options: dict) -> None:
    enc = built(name, options)
    data = sample(enc, tokens=20)
    code = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions)

    def later() -> list[Tensor]:
        tile = code.bias.tile(slice(5, 20), slice(0, 17))
        moved = [] if enc.breaks_relative_law else [enc.rebase_keys(code.k, 3)]
        return moved if tile is None else [tile, *moved]

    plain = later()
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in zip(later(), plain, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name, options", CASES)
def test_default_dtype_changes_no_call(name: str, options: dict, default: torch.dtype) -> None:
    enc = built(name, options)
    plain = encode(enc, torch.float32)
    with default_dtype(default):
        assert_same(encode(enc, torch.float32), plain)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name, options", CASES)
def test_built_under_another_default_dtype(name: str, options: dict, default: torch.dtype) -> None:
    """What an encoding holds itself is float32; projections of the input follow the default."""
    plain = built(name, options)
    with default_dtype(default):
        enc = built(name, options)
        encode(enc, torch.float32)
    linear = {f"{n}." for n, m in enc.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d))}
    for key, tensor in enc.state_dict().items():
        if any(key.startswith(prefix) for prefix in linear):
            assert tensor.dtype == default, key
        else:
            assert tensor.dtype == torch.float32, key
    for key, buffer in enc.named_buffers():
        if "initial" not in key or options.get("axes") != "mixed":
            assert torch.equal(buffer, plain.get_buffer(key)), key


@pytest.mark.parametrize("name, options", CASES)
def test_a_half_precision_model_rounds_inputs_and_weights_only(name: str, options: dict) -> None:
    """In bfloat16 everything is computed from the rounded numbers in float32 and rounded once."""
    enc = built(name, options).to(torch.bfloat16)
    exact = copy.deepcopy(enc).double()
    data = sample(enc, tokens=40, dtype=torch.bfloat16)
    wide = sample(enc, tokens=40, dtype=torch.bfloat16)
    ours = tensors(enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions))
    inputs = {n: None if t is None else t.double() for n, t in (("x", wide.x), ("v", wide.v))}
    right = tensors(exact(wide.q.double(), wide.k.double(), **inputs, positions=data.positions))
    for key, tensor in ours.items():
        scale = right[key].abs().clamp_min(1.0) if key != "bias" else right[key].abs().clamp_min(10.0)
        limit = 2**-8 if tensor.dtype == torch.bfloat16 else 2e-5
        worst = ((tensor.double() - right[key]).abs() / scale).max().item()
        assert worst <= limit, f"{key}: {worst:.3g}"


def test_weights_and_inputs_of_any_dtype_meet() -> None:
    for weights in (torch.float32, torch.bfloat16, torch.float64):
        for given in (torch.float32, torch.bfloat16, torch.float64):
            layer = WideLinear(4, 3).to(weights)
            x = torch.randn(2, 4, dtype=given)
            y = layer(x)
            assert y.dtype == torch.promote_types(given, torch.float32)
            right = x.double() @ layer.weight.double().T + layer.bias.double()
            torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-6)


class _OwnGate(NoPE):
    """An encoding as a user may write it, with a plain linear layer."""

    contextual = True

    def __init__(self, shape: grape.HeadShape) -> None:
        super().__init__(shape)
        self.gate = nn.Linear(shape.width or 0, shape.heads)

    def encode(self, tokens: grape.encodings.Tokens, state: object) -> Encoded:
        gate = self.gate(tokens.x).transpose(1, 2).unsqueeze(-1)
        return Encoded(tokens.q * gate.to(tokens.q.dtype), tokens.k, grape.bias.NO_BIAS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_encodings_need_no_care_for_autocast(dtype: torch.dtype) -> None:
    enc = _OwnGate(grape.encodings.HeadShape(2, 4, 2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert encode(enc, torch.bfloat16, x_dtype=dtype)["q"].dtype == torch.bfloat16


def elements() -> dict[str, object]:
    torch.manual_seed(0)
    n, angle = torch.arange(6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    planes = PlaneRotation.from_angle(angle, torch.float32)
    basis = orthogonal_from(torch.randn(8, 8))
    frame = orthonormal_columns(torch.randn(8, 4))
    a, b = torch.randn(2, 3, 4, dtype=torch.float64)
    return {
        "planes": planes,
        "basis": BasisRotation(basis, planes),
        "dense": DenseRotation(basis.expand(6, 8, 8)),
        "rank2": Rank2Rotation(torch.randn(8).double(), torch.randn(8).double(), n),
        "mixture": MixtureRotation(frame, skew_from_pairs(a, b), n),
        "joint": JointMixtureRotation(
            frame, torch.stack([skew_from_pairs(a, b)] * 2), torch.stack([n, n], -1)
        ),
    }


@pytest.mark.parametrize("name", list(elements()))
def test_group_elements_under_autocast_and_in_half_precision(name: str) -> None:
    element, x = elements()[name], torch.randn(6, 8)
    plain = element.apply(x)  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(element.apply(x), plain)  # type: ignore[attr-defined]
    half = x.to(torch.bfloat16)
    rounded = element.apply(half.float()).to(torch.bfloat16)  # type: ignore[attr-defined]
    assert torch.equal(element.apply(half), rounded)  # type: ignore[attr-defined]
