"""`Encoding`, the base class: it rotates q and k, builds the bias, and returns the state for the next tokens.

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
from ..checks import check_integer
from ..precision import autocasts, exact_dtype, readable, without_autocast, working_dtype
from .facts import Facts

#: What later tokens need of earlier ones, such as a running sum: (B, n, S), whose last T slices belong to the
#: new tokens; for a composition a tuple of states; None if there is no state.
State = Any


def map_state(function: Callable[..., Any], *states: State) -> Any:
    """Apply a function to the corresponding tensors of states of the same structure."""
    if isinstance(states[0], tuple):
        return tuple(map_state(function, *parts) for parts in zip(*states, strict=True))
    return None if states[0] is None else function(*states)


@dataclass(frozen=True)
class HeadShape:
    """The sizes of the attention that an encoding is built for.

    Args:
        heads: number of query heads.
        head_dim: features of a head.
        kv_heads: number of key heads.
        width: features of the attention block's input; None if unknown.
    """

    heads: int
    head_dim: int
    kv_heads: int
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "kv_heads"):
            check_integer(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}: "
                f"each key head serves heads / kv_heads query heads"
            )

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads


@dataclass(eq=False, slots=True)
class Tokens:
    """The checked inputs of `Encoding.encode`.

    Args:
        q: queries, (B, H, T, D).
        k: keys, (B, Hkv, T, D).
        positions: (B|1, T, coords), in float64.
        x: the attention block's input, (B, T, C).
        v: values, (B, Hkv, T, Dv).
        prepared: results of `Encoding.prepare` by encoding.
        whole: whether positions are known to be whole numbers, because they were integers.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    x: Tensor | None = None
    v: Tensor | None = None
    prepared: Mapping[nn.Module, Any] | None = None
    whole: bool = False

    def prepared_for(self, part: nn.Module) -> Any:
        """The result of `Encoding.prepare` for this encoding, or None."""
        return None if self.prepared is None else self.prepared.get(part)

    @property
    def working(self) -> torch.dtype:
        """The dtype for rates, gates and angles: float32, or float64 for float64 models."""
        return working_dtype(self.q.dtype)


@dataclass(eq=False, slots=True)
class Encoded:
    """The output of an encoding.

    Args:
        q: encoded queries, (B, H, T, D).
        k: encoded keys, (B, Hkv, T, D), to cache.
        bias: to add to the logits.
        state: to pass to the call with the next tokens; None if there is none.
    """

    q: Tensor
    k: Tensor
    bias: Bias
    state: State = None


class FullPrecision(nn.Module):
    """A module that keeps its own parameters and buffers in at least float32.

    A frequency rounded to bfloat16 is a different frequency. So `.to(torch.bfloat16)` does not cast these tensors,
    and torch's default dtype does not apply to them. Child modules, such as projections, are cast as usual.
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
    """An uninitialized parameter in float32, for any default dtype of torch (see `FullPrecision`)."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32))


class Encoding(FullPrecision, ABC):
    """Base class of all encodings. A subclass defines `encode`, and `reset_parameters` if it has parameters.

    Args:
        shape: heads, key heads, features of a head, and width.
        coords: number of coordinates of a position, 1 to 3.
    """

    #: whether it changes <q, k>; a composition has at most one such part
    transforms: ClassVar[bool] = False
    #: whether it reads the attention block's input x, so that `width` is needed
    contextual: ClassVar[bool] = False
    #: number of state slices that the next token reads: one, or more for a convolution
    lookback: int = 1
    #: whether the state is a running sum, so that parts of a sequence can be encoded separately and added up
    state_adds: ClassVar[bool] = False
    #: whether the cache replaces the tensors of old keys by `Bias.settled`; such an encoding has a state
    settles: ClassVar[bool] = False
    #: whether the lengths of encoded q and k carry information, which a QK norm after it would remove
    sets_norms: ClassVar[bool] = False
    #: whether b(t, j) <= 0 for all j <= t
    nonpositive: ClassVar[bool] = True
    #: its description, for each name it is registered under
    facts: ClassVar[Sequence[Facts]] = ()

    def __init__(self, shape: HeadShape, coords: int = 1) -> None:
        super().__init__()
        if coords not in (1, 2, 3):
            raise ValueError(f"coords, the number of position coordinates, must be 1, 2 or 3, got {coords!r}")
        if self.contextual and shape.width is None:
            raise ValueError(
                f"{type(self).__name__} reads the block's input x and needs its width; "
                "pass width=… (the model's hidden size)"
            )
        self.shape = shape
        self.coords = coords
        #: the `build` call that creates this encoding, for `repr`
        self.spec: str | None = None

    def __repr__(self) -> str:
        return self.spec or super().__repr__()

    @abstractmethod
    def encode(self, tokens: Tokens, state: State) -> Encoded:
        """Rotate q and k, build the bias, and return them with the new state.

        Args:
            tokens: the checked inputs.
            state: the state of earlier tokens; None at the start.
        """

    @property
    def like(self) -> Hashable | None:
        """A key for `Preparation`: encodings of equal class, shape and key are prepared together. None: never."""
        return None

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """Compute what depends only on parameters and positions, for all `parts` (encodings) at once.

        `encode` finds its result in `tokens.prepared`. Used for a few tokens without gradients.
        """
        raise NotImplementedError

    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        """Move encoded keys to positions smaller by `offset`; a ValueError if the relative law does not hold."""
        if self.breaks_relative_law:
            raise ValueError(f"keys cannot be moved to other positions: {self.breaks_relative_law}")
        return k

    def query_factor_of(self, tokens: Tokens) -> Tensor | None:
        """A factor of <q, k> for each query, (B|1, 1, T, 1); None for 1."""
        return None

    def multiplied(self, code: Encoded, factor: Tensor) -> Encoded:
        """Multiply <q, k> by a factor for each query, in an output of this encoding. The bias does not change."""
        return replace(code, q=(code.q * factor).to(code.q.dtype))

    def reset_parameters(self) -> None:
        """Fill parameters and buffers with their initial values, also after building on the meta device."""

    @property
    def breaks_relative_law(self) -> str | None:
        """Why the scores change if all positions shift by one number; None if they do not change."""
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
        """Encode new tokens. Autocast is off inside, so gates, angles and rotations keep their precision.

        Args:
            q: queries after any QK norm, (B, H, T, D).
            k: keys after any QK norm, (B, Hkv, T, D).
            x: the attention block's input, (B, T, C); needed by contextual encodings only.
            v: values, (B, Hkv, T, Dv); needed by `grape-ap` with probe="v" only.
            positions: (T,) or (B, T), integer or real; (T, n) or (B, T, n) for n coordinates.
                Default 0 … T-1, at the start of a sequence only.
            state: the state returned for the previous tokens; None at the start.

        Returns:
            Encoded q and k, the bias, and the state for the next tokens.
        """
        self.check(q, k, x)
        if x is not None and autocasts(q):
            x = x.to(working_dtype(x.dtype))  # float32, as the weights are under autocast
        with without_autocast(q):
            where = self._positions(positions, q, state)
            whole = positions is None or not positions.is_floating_point()
            tokens = Tokens(q, k, where, x, v, whole=whole)
            return self.encode(tokens, state)

    if TYPE_CHECKING:  # nn.Module declares that a call returns Any
        __call__ = forward

    def check(self, q: Tensor, k: Tensor, x: Tensor | None) -> None:
        """Raise an error unless shapes and dtypes are those this encoding was built for."""
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
    """Convert positions to (B|1, T, coords) in float64, or raise an error if they do not fit q."""
    check_numbers(positions)
    batch, length = q.shape[0], q.shape[2]
    tail = (coords,) if coords > 1 else ()
    if positions.shape not in ((length, *tail), (batch, length, *tail), (1, length, *tail)):
        raise ValueError(
            f"positions must have shape {(length, *tail)} or {(batch, length, *tail)}, one for each new token, "
            f"got {tuple(positions.shape)}"
        )
    rows = positions.shape[0] if positions.dim() > len((length, *tail)) else 1
    return positions.to(q.device, exact_dtype(q.device)).reshape(rows, length, coords)


def check_numbers(positions: Tensor) -> None:
    """Raise unless these are integers, or finite numbers of at least 32 bits."""
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"positions must be a torch.Tensor, got {type(positions).__name__}; use torch.tensor(…)"
        )
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions must be integer or real, got {positions.dtype}")
    if positions.is_floating_point() and not torch.compiler.is_compiling():
        if positions.dtype.itemsize < 4:
            raise TypeError(
                f"positions in {positions.dtype} are wrong from 256 or 2048 on; use integers or float32"
            )
        if readable(positions) and not bool(positions.isfinite().all()):
            raise ValueError("positions must be finite, got nan or inf; check how they are computed")


class NoPE(Encoding):
    """No position encoding: q and k do not change, and there is no bias."""

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
    """A sum of encodings: at most one of them changes <q, k>, and their biases are added.

    All parts read the same q and k, so gates read them before the rotation.

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
                f"at most one part may transform q and k, got {' and '.join(transforming)}: rotations that do not "
                "commute have no relative law; combine one of them with biases"
            )
        uneven = {name: part.coords for name, part in parts.items() if part.coords not in (coords,)}
        if uneven and not all(isinstance(parts[name], NoPE) for name in uneven):
            raise ValueError(
                f"all parts must have coords={coords}, got {uneven}; pass coords to each of them"
            )
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
        states: list[State] = []
        factor = self.query_factor_of(tokens)
        if factor is not None and not any(part.transforms for part in self._parts):
            q = (q * factor).to(q.dtype)
        for i, part in enumerate(self._parts):
            code = part.encode(tokens, None if state is None else state[i])
            if part.transforms:
                code = code if factor is None else part.multiplied(code, factor)
                q, k = code.q, code.k
            bias = code.bias if bias is NO_BIAS else bias + code.bias
            states.append(code.state)
        if (
            q.shape[-1] != self.shape.head_dim
        ):  # PoPE widens q, which makes the default scale of attend smaller
            bias = bias.with_gain((q.shape[-1] / self.shape.head_dim) ** 0.5)
        return Encoded(q, k, bias, tuple(states) if any(s is not None for s in states) else None)
