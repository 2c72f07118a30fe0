"""What an encoding does inside a model, seen while it reads a text.

`observe` runs a model once and keeps, for each layer, what went into the encoding and what came out. The
other functions answer one question each from that: bias by distance, gates, spectrum, reach.

Letters: B batch, H query heads, T tokens, D features of a head, n distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import attend
from ...bias import LINKS, Bias, PathBias, SlopeBias, SumBias, TileBias
from ...encodings import Encoding
from ...encodings.base import Encoded, Tokens
from ...encodings.liere import LieRE
from ...encodings.path import PaTHBias
from ...encodings.rotary import ContextualRotary, MixtureRotary, PlaneRotary, Rotary, RotationEncoding
from ...groups import quarter_turn, skew_from_pairs, spectrum
from ...models import Decoder
from ...testing import Sample, sample


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer's encoding with the tokens it met, its result, and the KV-shift gates beside it."""

    layer: int
    encoding: Encoding
    data: Sample
    code: Encoded
    shifts: dict[str, Tensor] = field(default_factory=dict)
    window: int | None = None
    sinks: int = 0
    scale: float | None = None  # of the scores, if not 1 / sqrt(D)

    @property
    def length(self) -> int:
        return self.data.q.shape[2]

    def bias(self) -> Tensor | None:
        """(B, H, T, T) in float64; None where the encoding adds nothing."""
        dense = added(self.code.bias, slice(0, self.length), slice(0, self.length))
        if dense is None:
            return None
        return dense.double().expand(-1, self.encoding.shape.heads, -1, -1)

    def attention(self) -> Tensor:
        """(B, H, T, T): the softmax weights."""
        code = self.code
        unit = torch.eye(self.length, dtype=code.q.dtype).expand(*code.k.shape[:2], -1, -1)
        masks: dict[str, Any] = {"window": self.window, "sinks": self.sinks, "scale": self.scale}
        return attend(code.q, code.k, unit, bias=code.bias, impl="reference", **masks).double()


@torch.no_grad()
def observe(model: Decoder, tokens: Tensor) -> list[LayerView]:
    """Run the model on tokens (T,) or (B, T) and keep what every layer's encoding saw."""
    tokens = (tokens[None] if tokens.dim() == 1 else tokens).to(model.head.device)
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    gates: list[dict[str, Tensor]] = [{} for _ in layers]
    hooks = [
        (linear, partial(_keep_gate, kept, name))
        for kept, layer in zip(gates, layers, strict=True)
        if (shift := layer.kv_shift) is not None
        for name, linear in (("key", shift.gate_k), ("value", shift.gate_v))
    ]
    with _hooked(hooks):
        seen = watch(model, model.model.encodings(), tokens)
    return [LayerView(i, *each, gates[i], layers[i].window, layers[i].sinks) for i, each in enumerate(seen)]


@torch.no_grad()
def watch(
    model: Any, encodings: Sequence[Encoding], tokens: Tensor
) -> list[tuple[Encoding, Sample, Encoded]]:
    """Run `model(tokens)` and keep what went into and came out of its encodings, in the order of the calls."""
    seen: list[tuple[Encoding, Sample, Encoded]] = []
    training = model.training
    try:
        with _hooked((each, partial(_keep_call, seen)) for each in {id(e): e for e in encodings}.values()):
            model.eval()(tokens)
    finally:
        model.train(training)
    return seen


@contextmanager
def _hooked(hooks: Iterable[tuple[Any, Callable[..., None]]]) -> Iterator[None]:
    """Call a function after the forward of each module."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_call(seen: list[Any], encoding: Encoding, args: Any, kwargs: dict[str, Any], code: Encoded) -> None:
    q, k = args
    positions = torch.arange(q.shape[2], device=q.device)
    seen.append((encoding, Sample(q, k, kwargs["v"], kwargs["x"], positions), code))


def _keep_gate(kept: dict[str, Tensor], name: str, module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
    kept[name] = torch.sigmoid(out).transpose(1, 2)


@torch.no_grad()
def observe_encoding(encoding: Encoding, tokens: int = 128) -> LayerView:
    """An encoding by itself, on unit normal queries, keys and inputs."""
    data = sample(encoding, batch=1, tokens=tokens, seed=0)
    code = encoding(data.q, data.k, x=data.x, v=data.v, positions=data.positions)
    return LayerView(0, encoding, data, code)


def distances(length: int) -> list[int]:
    """0, 1, 2, … to length - 1, growing geometrically once steps of one are too fine."""
    steps = [2 ** (i / 4) for i in range(4 * max(1, math.ceil(math.log2(max(length, 2)))))]
    return sorted({0, length - 1} | {round(step) for step in steps if round(step) < length})


def along(pairs: Tensor, distance: int) -> Tensor:
    """(…, T, T) at t - j = distance: (…, T - distance)."""
    return pairs.diagonal(-distance, -2, -1)


def by_distance(pairs: Tensor, at: Sequence[int]) -> Tensor:
    """(B, H, T, T) to (H, n, 3): mean, 5% and 95% quantile over batch and positions at each distance."""
    out = []
    for distance in at:
        values = along(pairs, distance).transpose(0, 1).flatten(1)
        out.append(torch.stack([values.mean(1), values.quantile(0.05, 1), values.quantile(0.95, 1)], -1))
    return torch.stack(out, 1)


def parts_of(encoding: Encoding) -> list[Encoding]:
    """The encodings a composition is made of, or the one itself."""
    parts = [m for m in encoding.modules() if isinstance(m, Encoding) and m is not encoding]
    return parts or [encoding]


def rotation_of(encoding: Encoding) -> RotationEncoding | None:
    return next((part for part in parts_of(encoding) if isinstance(part, RotationEncoding)), None)


def group_elements(view: LayerView) -> tuple[Tensor, Tensor] | None:
    """The matrices of every token, (Hkv, T, D, D), on queries and on keys, by encoding unit vectors.

    They are the same rotations G_t, but for xpos. None without a linear action.
    """
    part = rotation_of(view.encoding)
    if part is None:
        return None
    d, t, heads = part.shape.head_dim, view.length, part.shape.kv_heads
    unit = torch.eye(d, dtype=view.data.q.dtype)[:, None, None].expand(d, heads, t, d)
    q = unit[:, :1].expand(d, part.shape.heads, t, d)
    x = None if view.data.x is None else view.data.x[:1].expand(d, -1, -1)
    tokens = Tokens(q, unit, view.data.positions.double().view(1, -1, 1), x)
    code = part.encode(tokens, None)
    return code.q[:, :: part.shape.group].permute(1, 2, 3, 0), code.k.permute(1, 2, 3, 0)


def rotation_kernel(view: LayerView) -> Tensor | None:
    """tr(G_t^T G_j) / D, (1, Hkv, T, T): the mean score of a vector with itself, 1 at distance 0."""
    elements = group_elements(view)
    if elements is None:
        return None
    q, k = (each.double().flatten(2) for each in elements)
    return (q @ k.transpose(-1, -2))[None] / elements[0].shape[-1]


def frequencies(part: RotationEncoding) -> tuple[Tensor, Tensor | None] | None:
    """Radians a position for each plane, (groups, planes), and the initial ones if they are learned."""
    if isinstance(part, (Rotary, ContextualRotary)):
        now = _with_still_heads(part.frequencies()[:, 0], part)
        learned = part.frequencies.delta is not None
        first = _with_still_heads(part.frequencies.initial[:, 0].double(), part)
        return now.detach(), first if learned else None
    if isinstance(part, PlaneRotary):
        a = part.a.double()
        b = quarter_turn(a, part.layout) if part.b is None else part.b.double()
        return (part.frequency()[:, 0] * spectrum.area(a, b).unsqueeze(-1)).detach(), None
    if isinstance(part, MixtureRotary):
        return _modes(skew_from_pairs(*part.pairs.detach().double())[:, 0]), None
    if isinstance(part, LieRE):
        weight = part.weight.detach().double()[:, 0]
        return _modes(weight - weight.transpose(-1, -2)), None
    return None


def _with_still_heads(theta: Tensor, part: Rotary | ContextualRotary) -> Tensor:
    """(groups, planes), with zeros for key heads that are not turned."""
    still = part.shape.kv_heads - part.rotary_heads
    return F.pad(theta.expand(part.rotary_heads, -1), (0, 0, 0, still)) if still else theta


def _modes(skew: Tensor) -> Tensor:
    """The positive half of the eigenvalues of i L, largest first (Eq. S3)."""
    if not bool(skew.isfinite().all()):  # a diverged model: nothing to decompose
        return torch.full((*skew.shape[:-2], skew.shape[-1] // 2), math.nan, dtype=skew.dtype)
    mu = torch.linalg.eigvalsh(1j * skew)
    return mu.flip(-1)[..., : skew.shape[-1] // 2].clamp_min(0.0)


@dataclass(frozen=True, eq=False)
class Gate:
    """Something that depends on content: `values` (heads, any number)."""

    name: str
    values: Tensor


KEPT = "share of weight kept for each token passed"


def gates(view: LayerView) -> list[Gate]:
    """Everything the content decides, as the text decided it."""
    found = [*_bias_gates(view.code.bias), *_phase_gates(view)]
    found += [Gate(f"KV-shift: share of the previous {name}", z) for name, z in view.shifts.items()]
    return [Gate(gate.name, gate.values.transpose(0, 1).flatten(1).detach().double()) for gate in found]


def added(bias: Bias, rows: slice, cols: slice) -> Tensor | None:
    """A tile of what the bias adds to the plain product, which PaTH's bias contains."""
    tile = bias.tile(rows, cols)
    for part in bias.parts if isinstance(bias, SumBias) else (bias,):
        if isinstance(part, PaTHBias):
            tile = tile - part.products(rows, cols)  # type: ignore[operator]
    return tile


def _bias_gates(bias: Bias) -> Iterator[Gate]:
    """(B, H, N) each; rates and steps as exp(-what they cost), so that all of them read the same way."""
    if isinstance(bias, SumBias):
        for part in bias.parts:
            yield from _bias_gates(part)
    elif isinstance(bias, SlopeBias):
        for term in bias.terms:
            if term.coordinate == "sum" and term.rate_q is not None:
                yield Gate(KEPT, torch.exp(-term.rate_q * term.c_k.diff(dim=-1)))
            elif term.rate_q is not None and term.rate_q.shape[2] > 1:
                yield Gate(f"{KEPT}, by the query's gate", torch.exp(-term.rate_q))
            if term.rate_k is not None:
                yield Gate(f"{KEPT}, by the key's gate", torch.exp(-term.rate_k))
    elif isinstance(bias, PathBias):
        z = bias.probe_q @ bias.probe_k.transpose(-1, -2) / bias.probe_k.shape[-1]
        z = z.repeat_interleave(bias.rate.shape[1] // z.shape[1], 1)
        edges = torch.exp(bias.rate.unsqueeze(-1) * LINKS[bias.link](z))
        below = torch.ones(edges.shape[-2:]).tril().bool()
        yield Gate(KEPT, edges[..., below])
    elif isinstance(bias, TileBias) and "beta" in bias.key:
        yield Gate("strength β of each factor (1 forgets a direction, 2 reflects it)", bias.key["beta"])


def _phase_gates(view: LayerView) -> Iterator[Gate]:
    states = view.code.state if isinstance(view.code.state, tuple) else (view.code.state,)
    for part, state in zip(parts_of(view.encoding), states, strict=False):
        if isinstance(part, ContextualRotary):
            steps = part.phases(state).diff(dim=2)  # (B, Hkv|1, T - 1, planes|1)
            yield Gate("phase added by each token", steps.flatten(2))


def bias_reach(mean: Sequence[float], level: float) -> int | None:
    """The first distance at which exp(mean bias) is below `level`; None if it never falls so far."""
    return next((distance for distance, bias in enumerate(mean) if bias < math.log(level)), None)


@dataclass(frozen=True)
class Reach:
    """Of one head, in tokens; None where the bias never falls so far within the text, or there is none."""

    head: int
    bias_half: int | None
    bias_e: int | None
    attention_half: float
    attention_most: float


def reach(view: LayerView) -> list[Reach]:
    """How far each head of a layer looks."""
    attention, bias = view.attention(), view.bias()
    half, most = (attention_reach(attention, share).tolist() for share in (0.5, 0.9))
    means = [[]] * len(half) if bias is None else by_distance(bias, range(view.length))[..., 0].tolist()
    return [
        Reach(head, bias_reach(mean, 0.5), bias_reach(mean, math.exp(-1)), half[head], most[head])
        for head, mean in enumerate(means)
    ]


def attention_reach(attention: Tensor, share: float) -> Tensor:
    """(H,): the distance within which `share` of the attention lies; median over the later queries."""
    length = attention.shape[-1]
    t = torch.arange(length)
    by_distance = attention.gather(-1, (t[:, None] - t).clamp_min(0).expand_as(attention))
    by_distance = by_distance.masked_fill(t[:, None] < t, 0.0)
    within = (by_distance.cumsum(-1) < share).sum(-1)[..., length // 2 :]
    return within.transpose(0, 1).flatten(1).double().median(1).values
