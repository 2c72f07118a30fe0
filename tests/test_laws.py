"""Every law on every encoding, from one table. A new encoding is one row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grape_pe as grape
from grape_pe import testing

ROTATION = ("norm", "composition")
OFFSET = ("linear_in_offset", "unipotent")
CLOCK = ("path_composition", "unipotent")
CHECKS = {
    "norm": testing.assert_norm,
    "composition": testing.assert_composition,
    "linear_in_offset": testing.assert_linear_in_offset,
    "path_composition": testing.assert_path_composition,
    "unipotent": testing.assert_unipotent,
}


@dataclass(frozen=True)
class Row:
    """An encoding, the laws it keeps besides streaming, and how far its relative law reaches."""

    name: str
    laws: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    shift: int = 2**20
    relative: bool = True
    min_dim: int = 1
    real: bool = True  # takes positions between whole numbers; a table of distances refuses them

    def __str__(self) -> str:
        return self.name + "".join(f",{key}={value}" for key, value in self.options.items())


TABLE = [
    Row("nope"),
    Row("rope", ROTATION),
    Row("rope", ROTATION, {"layout": "interleaved", "base": 500.0}),
    Row("rope", ROTATION, {"coords": 2}, shift=2**19),
    Row("rope", ROTATION, {"rotary_dim": 2}, min_dim=2),
    Row("rope", ROTATION, {"rotary_dim": 4, "layout": "interleaved"}, min_dim=4),
    Row("rope", ROTATION, {"scaling": {"type": "llama3", "factor": 8.0, "original_context": 512}}, min_dim=2),
    Row("grape-m", ROTATION, {"scaling": {"type": "ntk", "factor": 4.0}}, min_dim=2),
    Row(
        "grape-m+alibi",
        ("linear_in_offset",),  # YaRN's attention factor changes the norm of queries
        {"scaling": {"type": "yarn", "factor": 4.0, "original_context": 64}, "rotary_dim": 4},
        min_dim=4,
    ),
    Row(
        "grape-m-basis", ROTATION, {"rotary_dim": 2, "scaling": {"type": "linear", "factor": 4.0}}, min_dim=2
    ),
    Row("grape-m", ROTATION),
    Row("grape-m", ROTATION, {"per_head": True}),
    Row("grape-m", ROTATION, {"per_head": True, "rotary_heads": 1, "rotary_dim": 2}, min_dim=2),
    Row("rope", ROTATION, {"rotary_heads": 1}),
    Row("rope", ROTATION, {"coords": 3, "sections": (1, 2, 1)}, shift=2**19, min_dim=8),
    Row("xpos", ("composition",)),
    Row("xpos", ("composition",), {"scale_base": 64.0, "gamma": 0.2, "layout": "interleaved"}),
    Row("xpos+fox"),
    Row("pope"),
    Row("pope+alibi", ("linear_in_offset",)),
    Row("grape-m", ROTATION, {"coords": 3, "axes": "mixed"}, shift=2**18),
    Row("grape-m-ctx", ROTATION),
    Row("grape-m-ctx", ROTATION, {"gate": "softplus", "phase_per_head": True}),
    Row("grape-m-ctx", ROTATION, {"phase_per_plane": True}),
    Row(
        "grape-m-ctx",
        ROTATION,
        {"phase_per_plane": True, "phase_per_head": True, "rotary_dim": 4, "rotary_heads": 1},
        min_dim=4,
    ),
    Row("grape-m-basis", ROTATION),
    Row(
        "grape-m-basis", ROTATION, {"basis_per_head": True, "layout": "interleaved", "coords": 2}, shift=2**19
    ),
    Row("grape-m-basis", ROTATION, {"basis": "unitary"}, min_dim=2),
    Row("grape-m-basis", ROTATION, {"rotary_heads": 1, "basis_per_head": True}),
    Row("string-cayley", ROTATION),
    Row("string-cayley", ROTATION, {"basis_per_head": True, "coords": 2}, shift=2**19),
    Row("string-circulant", ROTATION, min_dim=3),
    Row(
        "string-circulant",
        ROTATION,
        {"per_head": True, "layout": "interleaved", "coords": 2},
        2**19,
        min_dim=4,
    ),
    Row("grape-m-plane", ROTATION, min_dim=2),
    Row("grape-m-plane", ROTATION, {"tied": True, "layout": "interleaved"}, min_dim=2),
    Row("grape-m-mix", ROTATION, {"rank": 4, "per_head": True}, min_dim=4),
    Row("grape-m-mix", ROTATION, {"rank": 2}, min_dim=2),
    Row("grape-m-mix", ("norm",), {"rank": 4, "coords": 2}, relative=False, min_dim=4),
    Row("alibi", (*OFFSET, "path_composition")),
    Row("alibi", OFFSET, {"coords": 3}),
    Row("alibi", ("linear_in_offset",), {"coords": 2, "metric": "radial"}),
    Row("fox", CLOCK),
    Row("grape-a-shift", ("linear_in_offset",)),
    Row("grape-a-q", OFFSET),
    Row("grape-a-k", OFFSET),
    Row("grape-a-qk", OFFSET),
    Row("grape-a-qk", OFFSET, {"coords": 2}),
    Row("grape-a-dict", OFFSET, {"atoms": 3}),
    Row("grape-a-phase", CLOCK),
    Row("grape-a-phase", CLOCK, {"gate": "sigmoid", "phase_per_head": True}),
    Row("grape-ap", relative=False),
    Row("grape-ap", options={"probe_rotation": "relative", "link": "bounded"}),
    Row("grape-ap", options={"probe_rotation": "none", "probe_dim": 3}),
    Row("grape-ap", options={"probe_rotation": "relative", "probe": "q"}),
    Row("grape-ap", options={"probe_rotation": "relative", "probe": "k", "normalize_query": True}),
    Row("grape-ap", options={"probe_rotation": "relative", "probe": "v"}),
    Row("alibi", ("linear_in_offset",), {"both": True}, real=False),
    Row("t5", real=False),
    Row("t5", options={"buckets": 8, "max_distance": 6, "both": True}, real=False),
    Row("kerple-log", real=False),
    Row("kerple-power", real=False),
    Row("sandwich", options={"dim": 8}, real=False),
    Row("relative", options={"reach": 5}, real=False),
    Row("relative", options={"tables": 2, "reach": 4, "both": True, "beyond": "last"}, real=False),
    Row("rope+t5", ("norm",), real=False),
    Row("fire", options={"length": 2, "hidden": 5}, relative=False),
    Row("cope", options={"positions": 4}),
    Row("dape", options={"hidden": 5}, real=False),
    Row("rope+cope", ("norm",)),
    Row("grape-m+dape", ("norm",), {"kernel": "power"}, real=False),
    Row("liere", ROTATION, shift=2**10),
    Row("liere", ("norm",), {"coords": 2, "per_head": False}, relative=False, min_dim=3),
    Row("logn", options={"length": 2}, relative=False),
    Row("rope+alibi+logn", ("linear_in_offset",), {"length": 3}, relative=False),
    Row("path+logn", options={"length": 3}, relative=False),
    Row("path"),
    Row("path", options={"conv": 0, "rank": 2}),
    Row("rope+fox", ("norm",)),
    Row("grape-m+grape-a-qk+alibi", ("norm", "linear_in_offset")),
    Row("grape-m-mix+grape-ap", ("norm",), {"rank": 2, "probe_rotation": "relative"}, min_dim=2),
    Row("path+fox"),
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
everything = pytest.mark.parametrize("row", TABLE, ids=str)


def make(row: Row, *, kv_heads: int = 2, group: int = 1, dim: int = 8, dtype: torch.dtype = torch.float64):
    """The encoding with every parameter moved off its initial value."""
    torch.manual_seed(0)
    enc = grape.build(
        row.name, heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim, width=6, **row.options
    )
    with torch.no_grad():
        for parameter in enc.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return enc.to(dtype)


def draw(data, row: Row):
    """An encoding and tokens of hypothesis' choosing."""
    enc = make(
        row,
        kv_heads=data.draw(st.integers(1, 3), "kv_heads"),
        group=data.draw(st.integers(1, 3), "group"),
        dim=data.draw(st.integers(row.min_dim, 9).filter(lambda d: _fits(row, d)), "dim"),
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
    )
    dtype = torch.bfloat16 if _is_half(enc) else testing.parameter_dtype(enc)
    dtype = (
        data.draw(st.sampled_from(DTYPES), "data dtype") if not any(True for _ in enc.parameters()) else dtype
    )
    tokens = testing.sample(
        enc,
        batch=data.draw(st.integers(1, 2), "batch"),
        tokens=data.draw(st.integers(1, 14), "tokens"),
        dtype=dtype,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    return enc, tokens


def _fits(row: Row, dim: int) -> bool:
    return dim % 2 == 0 if row.options.get("basis") == "unitary" else True


def _is_half(enc) -> bool:
    return any(t.dtype == torch.bfloat16 for t in enc.parameters())


def test_every_name_is_in_the_table():
    assert {part for row in TABLE for part in row.name.split("+")} == set(grape.names())


@everything
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_relative_law(row: Row, data):
    enc, tokens = draw(data, row)
    # float64 angles carry float64 rounding: 2^20 positions cost six of its sixteen digits
    reach = min(row.shift, 2**12) if tokens.q.dtype == torch.float64 else row.shift
    shift = data.draw(st.integers(-reach, reach), "shift")
    if row.relative:
        testing.assert_relative_law(enc, tokens, shift=shift)
    else:
        with pytest.raises(testing.LawDoesNotHold):
            testing.assert_relative_law(enc, tokens, shift=shift)


@pytest.mark.parametrize("row", [row for row in TABLE if not row.relative], ids=str)
def test_a_refused_law_is_truly_broken(row: Row):
    enc = make(row)
    tokens = testing.sample(enc)
    moved = testing.scores(enc, tokens.at(tokens.positions + 1.5))
    assert (moved - testing.scores(enc, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("row", [row for row in TABLE if row.relative and row.shift == 2**20], ids=str)
def test_relative_law_in_float32_at_two_to_the_twenty(row: Row):
    enc = make(row, dim=16, dtype=torch.float32)
    testing.assert_relative_law(enc, testing.sample(enc, dtype=torch.float32), shift=2**20)


@pytest.mark.parametrize("row,law", [(row, law) for row in TABLE for law in row.laws], ids=str)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_law(row: Row, law: str, data):
    enc, tokens = draw(data, row)
    CHECKS[law](enc, tokens)


@everything
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_streaming(row: Row, data):
    enc, tokens = draw(data, row)
    cuts = data.draw(st.lists(st.integers(1, 13), max_size=5), "cuts")
    testing.assert_streaming(enc, tokens, cuts)


@everything
def test_nonpositive_where_promised(row: Row):
    enc = make(row)
    if enc.nonpositive:
        testing.assert_nonpositive(enc)
    else:
        with pytest.raises(AssertionError):
            testing.assert_nonpositive(enc, testing.sample(enc, tokens=40))


@everything
def test_batched_and_real_positions(row: Row):
    """Positions given for each sequence, as real numbers where it takes them, act on that sequence alone."""
    enc = make(row)
    tokens = testing.sample(enc)
    shifts = torch.tensor([0.0, 17.25 if row.real else 17.0]).view(2, *(1,) * tokens.positions.dim())
    batched = testing.scores(enc, tokens.at(tokens.positions + shifts))
    for b in range(2):
        alone = testing.scores(enc, tokens.at(tokens.positions + shifts[b]))
        testing.assert_close(batched[b], alone[b], torch.float64, f"sequence {b}")


@everything
def test_gradients(row: Row):
    """Gradients to q, k, x and every parameter match finite differences."""
    if row.name == "liere":
        pytest.skip("matrix_exp is torch's")
    enc = make(row, kv_heads=1, group=2, dim=max(4, row.min_dim))
    tokens = testing.sample(enc, batch=1, tokens=4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (tokens.q, tokens.k, tokens.v, tokens.x)]
    names = [name for name, _ in enc.named_parameters()]

    def logits(q, k, v, x, *parameters):
        code = torch.func.functional_call(
            enc,
            dict(zip(names, parameters, strict=True)),
            (q, k),
            {"x": x, "v": v, "positions": tokens.positions},
        )
        return testing.laws._logits(code.q, code.k, code.bias.dense(), 2).tril()

    assert torch.autograd.gradcheck(logits, (*inputs, *enc.parameters()))


@everything
def test_gradients_reach_every_parameter_from_the_start(row: Row):
    """At initialisation nothing is dead: every parameter gets a finite gradient."""
    torch.manual_seed(0)
    enc = grape.build(row.name, heads=2, head_dim=8, width=6, **row.options).double()
    if not list(enc.parameters()):
        pytest.skip("nothing is learned")
    tokens = testing.sample(enc)
    code = enc(tokens.q, tokens.k, x=tokens.x, v=tokens.v, positions=tokens.positions)
    y = grape.attend(code.q, code.k, tokens.v, bias=code.bias, impl="reference")
    y.square().sum().backward()
    for name, parameter in enc.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, f"{name} gets no gradient"


@everything
def test_repr_builds_it_again(row: Row):
    enc = make(row)
    again = eval(repr(enc), {"build": grape.build})
    assert repr(again) == repr(enc)
    again.double().load_state_dict(enc.state_dict())
    tokens = testing.sample(enc)
    assert torch.equal(testing.scores(again, tokens), testing.scores(enc, tokens))


@everything
def test_meta_build_and_reset(row: Row):
    """Built without memory, materialised, reset: the same as built at once."""
    with torch.device("meta"):
        empty = grape.build(row.name, heads=2, head_dim=8, width=6, **row.options)
    enc = empty.to_empty(device="cpu")
    for tensor in (*enc.parameters(), *enc.buffers()):
        tensor.data.fill_(float("nan"))
    enc.reset_parameters()
    for name, tensor in enc.state_dict().items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("name", ["grape-m", "alibi", "grape-m-plane", "grape-a-qk"])
def test_precision_survives_a_cast_to_bfloat16(name: str):
    enc = grape.build(name, heads=4, head_dim=16, width=8)
    before = {key: value.clone() for key, value in enc.state_dict().items()}
    enc.to(torch.bfloat16)
    for key, value in enc.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[key]), key
