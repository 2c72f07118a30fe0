"""Fuzz target: `attend` and the encodings against dense float64, in all dtypes, memory layouts and global settings.

Allowed norm of the error, of the output and of each gradient: in half precision twice the error of the dense
computation in the same dtype, in float32 and float64 four times this error; but at least the spacing of numbers in half
precision, 1e-5 of the value in float32, and 1e-10 of it in float64.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...attention import attend, key_bound
from ...bias import Bias, NoBias
from ...encodings import Encoding
from .dense import dense_attention, dense_attention_lse, torch_attention, visible_keys
from .draw import Layout, RawBias, Sizes, draw_bias, draw_masks, draw_sizes
from .encodings import draw_encoding, draw_positions
from .runner import Outcome
from .skipping import skipping

#: dtype -> allowed factor of the dense error, and relative error that is always allowed
RULE = {
    torch.float64: (4.0, 1e-10),
    torch.float32: (4.0, 1e-5),
    torch.bfloat16: (2.0, 2**-7),
    torch.float16: (2.0, 2**-10),
}
#: The dense error of one draw may be small by chance, above all for a gradient of a few numbers. A case that breaks the
#: rule is drawn this many times more, and judged by norms over all draws; sizes and dtypes are the same, because
#: otherwise the draw with the largest logits would dominate.
MORE_DRAWS = 8
#: implementations that need seconds to compile and have their own tests
SLOW = ("flex", "triton")


@dataclass
class Case:
    """One problem. `values` are its leaves in float64, rounded to the dtypes in `dtypes`."""

    seed: int
    sizes: Sizes
    dtype: torch.dtype
    default_dtype: torch.dtype
    autocast: torch.dtype | None
    learns: bool
    masks: dict[str, Any]
    options: dict[str, Any]
    layouts: dict[str, Layout]
    raw: RawBias | None = None
    encoding: Encoding | None = None
    positions: Tensor | None = None
    threads: int = 1
    skips: bool = False  # decoding skips keys: see `skipping`
    values: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scales: Any = None  # state of the generator that draws scales and dtypes of the values

    def __str__(self) -> str:
        what = repr(self.encoding) if self.raw is None else self.raw.name
        masks = ", ".join(f"{name}={_short(value)}" for name, value in self.masks.items())
        layouts = ", ".join(f"{name} {layout.kind}" for name, layout in self.layouts.items())
        return (
            f"seed {self.seed}: {what}\n  {self.sizes}\n  {self.dtype}, default {self.default_dtype}, "
            f"autocast {self.autocast}, gradients {self.learns}, {self.threads} threads, skips {self.skips}\n"
            f"  {masks}\n  {self.options}\n  {layouts}"
        )


def _short(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def draw_case(seed: int) -> Case:
    """Draw a case."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    s = draw_sizes(rng)
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    case = Case(
        seed,
        s,
        dtype,
        default_dtype=rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16)),
        autocast=rng.choice((None, None, torch.bfloat16, torch.float16)),
        learns=rng.random() < 0.7,
        masks=draw_masks(rng, generator, s),
        options=_draw_options(rng, dtype),
        layouts={},
    )
    if rng.random() < 0.4:
        case.encoding = draw_encoding(rng, s).to(rng.choice((dtype, torch.float32)))
        case.positions = draw_positions(rng, generator, case.encoding, s, far=not case.learns)
        queries = s.keys
    else:
        case.raw = draw_bias(rng, s)
        queries = s.queries
    for name, heads, tokens, width in (
        ("q", s.heads, queries, s.width),
        ("k", s.kv_heads, s.keys, s.width),
        ("v", s.kv_heads, s.keys, s.value_width),
    ):
        case.layouts[name] = Layout(rng, (s.batch, heads, tokens, width))
    case.threads = rng.choice((1, 1, 1, 2, 4))
    case.skips = rng.random() < 0.3
    case.scales = rng.getstate()
    _draw_values(case, rng, generator)
    return case


def _draw_options(rng: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.0, 0.3, 1, 1.7, -0.5))
    if rng.random() < 0.4:
        options["prune"] = rng.choice((None, "auto", 30.0))
    if rng.random() < 0.2 and dtype != torch.float64:  # it is float32
        options["return_lse"] = True
    return options


def _draw_values(case: Case, rng: random.Random, generator: torch.Generator) -> None:
    wide = torch.promote_types(case.dtype, torch.float32)

    def add(name: str, size: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        value = scale * torch.randn(size, generator=generator, dtype=torch.float64)
        case.values[name], case.dtypes[name] = value.to(dtype).double(), dtype
        return value

    for name, layout in case.layouts.items():
        add(name, layout.size, case.dtype, rng.choice((0.3, 1.0, 1.0, 3.0)))
    if case.encoding is not None and case.encoding.shape.width is not None:
        add("x", (case.sizes.batch, case.sizes.keys, case.encoding.shape.width), case.dtype)
    for name, size in (case.raw.sizes if case.raw else {}).items():
        dtype = rng.choice((wide, wide, torch.float64))
        value = add(name, size, dtype, rng.choice((0.1, 1.0, 4.0)))
        if case.raw and name in case.raw.growing:
            case.values[name] = value.abs().cumsum(-1).to(dtype).double()


@contextlib.contextmanager
def _surroundings(case: Case) -> Iterator[None]:
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(case.default_dtype)
    torch.set_num_threads(case.threads)
    try:
        dtype, on = case.autocast or torch.bfloat16, case.autocast is not None
        with torch.autocast("cpu", dtype=dtype, enabled=on), skipping(case.skips):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


Compute = Callable[[Tensor, Tensor, Tensor, Bias], Tensor]


def evaluate(case: Case, exact: bool, compute: Compute, surrounded: bool) -> dict[str, Tensor]:
    """The output and all gradients, in float64. With `exact` the whole computation is in float64."""
    leaves = {
        name: value.to(torch.float64 if exact else case.dtypes[name]).clone().requires_grad_(case.learns)
        for name, value in case.values.items()
    }
    encoding = copy.deepcopy(case.encoding)
    if encoding is not None and (exact or case.dtype == torch.float64):
        encoding = encoding.double()
    with _surroundings(case) if surrounded else contextlib.nullcontext(), torch.set_grad_enabled(case.learns):
        y = compute(*_encoded(case, leaves, encoding))
        if not case.learns:
            return {"y": y.double()}
        weight = torch.Generator().manual_seed(case.seed)
        loss = torch.randn(y.shape, generator=weight, dtype=torch.float64).to(case.dtype).to(y.dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.default_dtype if surrounded else default)
    try:
        if y.requires_grad:
            y.backward(loss)
    finally:
        torch.set_default_dtype(default)
    if encoding is not None:
        leaves |= dict(encoding.named_parameters())
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
    return {"y": y.detach().double()} | {f"grad of {name}": grad.double() for name, grad in grads.items()}


def _encoded(
    case: Case, leaves: dict[str, Tensor], encoding: Encoding | None
) -> tuple[Tensor, Tensor, Tensor, Bias]:
    q, k, v = (case.layouts[name].view(leaves[name]) for name in "qkv")
    if encoding is None:
        return q, k, v, case.raw.make(leaves) if case.raw is not None else NoBias()
    code = encoding(q, k, x=leaves.get("x"), v=v, positions=case.positions)
    last = slice(case.sizes.keys - case.sizes.queries, case.sizes.keys)
    return code.q[:, :, last], code.k, v, code.bias.queries(last)


def check(seed: int) -> Outcome:
    """Draw a case and compare every implementation that accepts it with the dense computation."""
    case, outcome = draw_case(seed), Outcome()
    with contextlib.suppress(_Refused):
        names = _accepting(case, outcome)
        truth, peers = _compare_with(case)
        for name in names:
            errors = _errors(truth, peers, _attempt(case, outcome, _by(name, case)))
            outcome.runs += 1
            if _broken(case, errors):
                _judge_more_draws(seed, name, errors, outcome)
    return outcome


#: squared norms of the error, of the largest dense error and of the value; and the number of elements
Errors = dict[str, tuple[float, float, float, int]]


def _errors(truth: dict[str, Tensor], peers: list[dict[str, Tensor]], got: dict[str, Tensor]) -> Errors:
    def one(what: str, right: Tensor) -> tuple[float, float, float, int]:
        if got[what].shape != right.shape:
            return math.inf, 0.0, 0.0, 0
        ours, *known = (float((x[what] - right).square().sum()) for x in (got, *peers))
        return ours, max(known), float(right.square().sum()), right.numel()

    return {what: one(what, right) for what, right in truth.items()}


def _size(case: Case, what: str) -> float:
    """The size of terms that may cancel in a gradient; with one visible key all of them do."""
    tensors = (
        () if what == "y" else "qkv" if what[8:] not in (case.raw.sizes if case.raw else ()) else case.values
    )
    return max([1.0, *(float(case.values[n].abs().max()) for n in tensors if case.values[n].numel())])


def _broken(case: Case, errors: Errors) -> list[str]:
    times, part = RULE[case.dtype]
    wrong = []
    for what, (error, known, norm, count) in errors.items():
        allowed = max(times * known**0.5, part * (norm**0.5 + 0.1 * _size(case, what) * count**0.5))
        if not error**0.5 <= allowed:
            wrong.append(f"{what}: error {error**0.5:.3g}, dense {known**0.5:.3g}, norm {norm**0.5:.3g}")
    return wrong


def _judge_more_draws(seed: int, name: str, errors: Errors, outcome: Outcome) -> None:
    case, rng = draw_case(seed), random.Random()
    for draw in range(1, 1 + MORE_DRAWS):
        rng.setstate(case.scales)
        _draw_values(case, rng, torch.Generator().manual_seed(draw))
        truth, peers = _compare_with(case)
        more = _errors(truth, peers, _attempt(case, outcome, _by(name, case)))
        errors = {what: tuple(map(sum, zip(errors[what], more[what], strict=True))) for what in errors}  # type: ignore[misc]
    wrong = _broken(case, errors)
    assert not wrong, f"impl={name!r}: {'; '.join(wrong)}\n{case}"


def _by(name: str, case: Case) -> Compute:
    def compute(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        return _joined(attend(q, k, v, bias=bias, impl=name, **_arguments(case, k)))

    return compute


def _joined(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The output, with the logsumexp, if requested, as one more feature: 0 for rows without visible keys."""
    if isinstance(result, Tensor):
        return result
    y, lse = result
    return torch.cat([y.to(lse.dtype), lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)], -1)


def _compare_with(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The dense computation in float64, and in the case's dtype: ours and, in half precision, torch's."""
    visible = visible_keys(case.sizes.queries, case.sizes.keys, case.masks)
    given = case.options.get("scale")

    def by(compute: Callable[..., Any], working: torch.dtype) -> Compute:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
            scale = q.shape[-1] ** -0.5 if given is None else given  # an encoding may have made q wider
            return _joined(compute(q, k, v, bias, visible, scale, working))

        return run

    with_lse = "return_lse" in case.options
    dense: Callable[..., Any] = dense_attention_lse if with_lse else dense_attention
    truth = evaluate(case, True, by(dense, torch.float64), surrounded=False)
    working = torch.promote_types(case.dtype, torch.float32)
    kinds = (dense, torch_attention) if case.dtype.itemsize < 4 and not with_lse else (dense,)
    return truth, [evaluate(case, False, by(kind, working), surrounded=False) for kind in kinds]


class _Refused(Exception):
    """The library raised a ValueError or TypeError for the case."""


def _arguments(case: Case, k: Tensor) -> dict[str, Any]:
    bound = {"key_bound": key_bound(k.detach())} if case.skips else {}
    return {**case.masks, **case.options, **bound}


def _attempt(case: Case, outcome: Outcome, compute: Compute) -> dict[str, Tensor]:
    try:
        return evaluate(case, False, compute, surrounded=True)
    except (ValueError, TypeError) as error:
        if "unexpected keyword" in str(error):
            raise
        outcome.refused.append(" ".join(str(error).split())[:100])
        raise _Refused from error
    except Exception as error:
        raise RuntimeError(f"{error}\n{case}") from error


def _accepting(case: Case, outcome: Outcome) -> list[str]:
    """ "auto", and the implementations that support the case."""
    found: list[str] = []

    def ask(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        why = attend.explain(q, k, v, bias=bias, **_arguments(case, k))
        found.extend(["auto", why.impl, *(n for n, r in why.why_not.items() if r == "less preferred here")])
        return v

    _attempt(case, outcome, ask)
    return [name for name in found if name not in SLOW]
