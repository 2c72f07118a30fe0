"""The base class of encodings: rotate q and k, build the bias, return the state for the next tokens.

Letters: B batch, H query heads, Hkv key heads, T new tokens, D features of a head, C model width.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..bias import NO_BIAS, Bias
from ..precision import autocasts, exact_dtype, without_autocast, working_dtype
from .facts import Facts

#: What must be carried from earlier tokens: (B, n, S), of which the last T slices belong to the new
#: tokens; a tuple of such for a composition; None when nothing is carried.
State = Any


@dataclass(frozen=True)
class HeadShape:
    """The sizes an encoding is built for.

    Args:
        heads: query heads.
        head_dim: features of a head.
        kv_heads: key heads.
        width: features of the block's input; None if unknown.
    """

    heads: int
    head_dim: int
    kv_heads: int
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}; "
                f"each key head serves heads / kv_heads queries"
            )

    @property
    def group(self) -> int:
        """Queries that share one key head."""
        return self.heads // self.kv_heads


@dataclass(eq=False, slots=True)
class Tokens:
    """New tokens, checked.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, T, D).
        positions: (B|1, T, coords) in float64.
        x: (B, T, C), the block's input.
        v: (B, Hkv, T, Dv).
        prepared: by encoding, what `Encoding.prepare` made for these tokens.
        whole: positions were given as integers and need not be checked.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    x: Tensor | None = None
    v: Tensor | None = None
    prepared: Mapping[nn.Module, Any] | None = None
    whole: bool = False

    def prepared_for(self, part: nn.Module) -> Any:
        """None if nothing was."""
        return None if self.prepared is None else self.prepared.get(part)

    @property
    def working(self) -> torch.dtype:
        """The dtype for rates, gates and angles: float32, or float64 for float64 models."""
        return working_dtype(self.q.dtype)


@dataclass(eq=False, slots=True)
class Encoded:
    """q and k ready to be scored, the bias to add, and the state for the next tokens.

    Args:
        q: encoded queries (B, H, T, D).
        k: encoded keys (B, Hkv, T, D), to be cached.
        bias: to be added to the logits.
        state: to be passed to the next call.
    """

    q: Tensor
    k: Tensor
    bias: Bias
    state: State = None


class FullPrecision(nn.Module):
    """A module whose own parameters and buffers never fall below float32.

    A frequency rounded to bfloat16 is a different frequency: `.to(torch.bfloat16)` moves such
    tensors but keeps their precision, and they are float32 also where torch's default dtype is shorter.
    Child modules (projections) are cast as usual.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and _too_short(param):
            param = nn.Parameter(param.detach().float(), param.requires_grad)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        short = tensor is not None and _too_short(tensor)
        super().register_buffer(name, tensor.float() if tensor is not None and short else tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullPrecision:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if _too_short(moved) else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep, recurse=False)  # type: ignore[no-any-return]


def _too_short(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def own_parameter(*size: int) -> nn.Parameter:
    """An empty parameter in float32, whatever torch's default dtype: see `FullPrecision`."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32))


class Encoding(FullPrecision, ABC):
    """Base of every encoding. A new one defines `encode`, and `reset_parameters` if it has any.

    `forward` checks its inputs once, for all of them; `encode` gets clean `Tokens`.

    Args:
        shape: heads, key heads, features of a head, and width.
        coords: coordinates of a position, 1 to 3.
    """

    #: replaces the plain product <q, k>; at most one such part in a composition
    transforms: ClassVar[bool] = False
    #: reads the block's input x, so `width` is needed
    contextual: ClassVar[bool] = False
    #: how many slices of the state the next token reads: the last one, or a few for a convolution
    lookback: int = 1
    #: the state is a running sum: parts of a sequence can be encoded apart, each from the totals before it
    state_adds: ClassVar[bool] = False
    #: a cache rewrites the tensors of older tokens through `Bias.settled`; such an encoding has a state
    settles: ClassVar[bool] = False
    #: lengths of its q and k mean something: a QK norm after it would undo that
    sets_norms: ClassVar[bool] = False
    #: the paper promises b(t, j) <= 0 for j <= t
    nonpositive: ClassVar[bool] = True
    #: what to say about it, for each of its registered names
    facts: ClassVar[Sequence[Facts]] = ()

    def __init__(self, shape: HeadShape, coords: int = 1) -> None:
        super().__init__()
        if coords not in (1, 2, 3):
            raise ValueError(f"coords must be 1, 2 or 3 position coordinates, got {coords!r}")
        if self.contextual and shape.width is None:
            raise ValueError(
                f"{type(self).__name__} reads the block's input x and needs its width; "
                "pass width=… (the model's hidden size)"
            )
        self.shape = shape
        self.coords = coords
        #: the `build` call that makes this encoding again
        self.spec: str | None = None

    def __repr__(self) -> str:
        return self.spec or super().__repr__()

    @abstractmethod
    def encode(self, tokens: Tokens, state: State) -> Encoded:
        """Rotate q and k; build the bias."""

    @property
    def like(self) -> Hashable | None:
        """Encodings of one class and shape with the same value are prepared together; None: never prepared."""
        return None

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """For each of `parts`, what `encode` may find in `tokens.prepared`: all that depends on parameters and
        positions only, computed for all of them at once. Called for a few tokens without gradients."""
        raise NotImplementedError

    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        """Encoded keys as if at positions smaller by `offset`; a ValueError where no law allows it."""
        if self.breaks_relative_law:
            raise ValueError(f"keys cannot be moved to other positions: {self.breaks_relative_law}")
        return k

    def query_factor_of(self, tokens: Tokens) -> Tensor | None:
        """What <q, k> of each query is to be multiplied by, (B|1, 1, T, 1); None for 1."""
        return None

    def multiplied(self, code: Encoded, factor: Tensor) -> Encoded:
        """What this encoding returned, with <q, k> times a factor of each query; the bias stays."""
        return replace(code, q=(code.q * factor).to(code.q.dtype))

    def reset_parameters(self) -> None:
        """Fill parameters and buffers with their initial values (also after a meta-device build)."""

    @property
    def breaks_relative_law(self) -> str | None:
        """Why scores change when all positions shift together; None where they do not."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        x: Tensor | None = None,
        v: Tensor | None = None,
        positions: Tensor | None = None,
        state: State = None,
    ) -> Encoded:
        """Encode new tokens. Autocast is off inside: gates, angles and rotations keep their precision.

        Args:
            q: (B, H, T, D) after any QK norm.
            k: (B, Hkv, T, D) after any QK norm.
            x: (B, T, C), the block's input; only contextual encodings read it.
            v: (B, Hkv, T, Dv); only `grape-ap` with probe="v" reads it.
            positions: (T,) or (B, T), integer or real; (T, n) or (B, T, n) with n coordinates.
                Default 0 … T-1, for the start of a sequence only.
            state: what the previous call returned; None at the start.
        """
        self.check(q, k, x)
        if x is not None and autocasts(q):
            x = x.to(working_dtype(x.dtype))  # as autocast keeps weights: in float32
        with without_autocast(q):
            whole = positions is None or not positions.is_floating_point()
            tokens = Tokens(q, k, self._positions(positions, q, state), x, v, whole=whole)
            return self.encode(tokens, state)

    if TYPE_CHECKING:  # nn.Module declares that a call returns Any
        __call__ = forward

    def check(self, q: Tensor, k: Tensor, x: Tensor | None) -> None:
        """Raise unless shapes and dtypes are those this encoding was built for."""
        self._check_heads(q, k)
        self._check_input(x, q)

    def _check_heads(self, q: Tensor, k: Tensor) -> None:
        shape = self.shape
        batch, length = (q.shape[0], q.shape[2]) if q.dim() == 4 else (0, 0)
        if q.shape != (batch, shape.heads, length, shape.head_dim) or q.dim() != 4:
            raise ValueError(
                f"q must be (batch, {shape.heads} heads, tokens, {shape.head_dim}), got {tuple(q.shape)}; "
                "this encoding was built for that many heads and features"
            )
        if k.shape != (batch, shape.kv_heads, length, shape.head_dim):
            raise ValueError(
                f"k must be (batch, {shape.kv_heads} heads, tokens, {shape.head_dim}) with q's batch and "
                f"tokens, got {tuple(k.shape)} for q {tuple(q.shape)}; set kv_heads=… for grouped keys"
            )
        if q.dtype != k.dtype:
            raise TypeError(f"q and k must share a dtype, got {q.dtype} and {k.dtype}; cast one of them")

    def _check_input(self, x: Tensor | None, q: Tensor) -> None:
        want = (q.shape[0], q.shape[2], self.shape.width)
        if self.contextual and (x is None or x.shape != want):
            got = "nothing" if x is None else str(tuple(x.shape))
            raise ValueError(
                f"{type(self).__name__} reads the block's input: expected x of shape {want}, got {got}; "
                "pass x=… (before the query projection)"
            )

    def _positions(self, positions: Tensor | None, q: Tensor, state: State) -> Tensor:
        length, coords = q.shape[2], self.coords
        if positions is None:
            if state is not None or coords > 1:
                why = "continuing from a state" if state is not None else f"coords={coords}"
                raise ValueError(f"positions must be given when {why}; pass positions=…, one for each token")
            return torch.arange(length, device=q.device, dtype=exact_dtype(q.device)).view(1, -1, 1)
        return check_positions(positions, q, coords)


def check_positions(positions: Tensor, q: Tensor, coords: int) -> Tensor:
    """Positions as (B|1, T, coords) in float64, or an error that says what was expected."""
    batch, length = q.shape[0], q.shape[2]
    tail = (coords,) if coords > 1 else ()
    if positions.shape not in ((length, *tail), (batch, length, *tail), (1, length, *tail)):
        raise ValueError(
            f"positions must be {(length, *tail)} or {(batch, length, *tail)}, one for each new token; "
            f"got {tuple(positions.shape)}"
        )
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions must be integer or real, got {positions.dtype}")
    if positions.is_floating_point() and not torch.compiler.is_compiling():
        if positions.dtype.itemsize < 4:
            raise TypeError(
                f"positions in {positions.dtype} are wrong from 256 or 2048 on; use integers or float32"
            )
        if not bool(positions.isfinite().all()):
            raise ValueError("positions must be finite, got nan or inf; check how they were computed")
    rows = positions.shape[0] if positions.dim() > len((length, *tail)) else 1
    return positions.to(q.device, exact_dtype(q.device)).reshape(rows, length, coords)


class NoPE(Encoding):
    """No position at all: the zero generator."""

    facts = (
        Facts(
            name="nope",
            about="changes nothing",
            formula="G_n = I",
            group="the identity of SO(D): the zero generator",
            source="Kazemnejad et al., 2023, arXiv:2305.19466; some layers of SmolLM3 and Llama 4",
            recovers="NoPE",
        ),
    )

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        return Encoded(tokens.q, tokens.k, NO_BIAS)


class Composite(Encoding):
    """Several encodings at once: at most one transforms q and k, the biases add.

    Every part reads the q and k that came in, so gates see them before the rotation.

    Args:
        shape: heads, key heads, features of a head, and width.
        parts: the encodings by name.
    """

    def __init__(self, shape: HeadShape, parts: dict[str, Encoding]) -> None:
        coords = max(part.coords for part in parts.values())
        super().__init__(shape, coords)
        transforming = [name for name, part in parts.items() if part.transforms]
        if len(transforming) > 1:
            raise ValueError(
                f"at most one part may transform q and k, got {' and '.join(transforming)}; "
                "two rotations that do not commute keep no relative law. Compose one with biases"
            )
        uneven = {name: part.coords for name, part in parts.items() if part.coords not in (coords,)}
        if uneven and not all(isinstance(parts[name], NoPE) for name in uneven):
            raise ValueError(f"all parts must share coords={coords}, got {uneven}; pass coords to each")
        self.parts = nn.ModuleDict(parts)
        self.lookback = max(part.lookback for part in parts.values())

    @property
    def _parts(self) -> list[Encoding]:
        return list(self.parts.values())  # type: ignore[arg-type]

    @property
    def nonpositive(self) -> bool:  # type: ignore[override]
        return all(part.nonpositive for part in self._parts)

    @property
    def breaks_relative_law(self) -> str | None:
        reasons = (part.breaks_relative_law for part in self._parts)
        return next((reason for reason in reasons if reason), None)

    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        for part in self._parts:
            k = part.rebase_keys(k, offset)
        return k

    def reset_parameters(self) -> None:
        for part in self._parts:
            part.reset_parameters()

    def _check_input(self, x: Tensor | None, q: Tensor) -> None:
        for part in self._parts:
            part._check_input(x, q)

    def query_factor_of(self, tokens: Tokens) -> Tensor | None:
        found = [part.query_factor_of(tokens) for part in self._parts]
        factors = [factor for factor in found if factor is not None]
        return functools.reduce(torch.mul, factors) if factors else None

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        q, k = tokens.q, tokens.k
        bias: Bias = NO_BIAS
        carried: list[State] = []
        factor = self.query_factor_of(tokens)
        if factor is not None and not any(part.transforms for part in self._parts):
            q = (q * factor).to(q.dtype)
        for i, part in enumerate(self._parts):
            code = part.encode(tokens, None if state is None else state[i])
            if part.transforms:
                code = code if factor is None else part.multiplied(code, factor)
                q, k = code.q, code.k
            bias = code.bias if bias is NO_BIAS else bias + code.bias
            carried.append(code.state)
        if q.shape[-1] != self.shape.head_dim:  # PoPE: attend's scale is then smaller
            bias = bias.with_gain((q.shape[-1] / self.shape.head_dim) ** 0.5)
        return Encoded(q, k, bias, tuple(carried) if any(s is not None for s in carried) else None)
