"""`ContextParallel`: one sequence on several devices, for every rotation and every bias of slopes, paths and distances.

    parallel = ContextParallel(group)                     # in every rank; None: all ranks
    x = parallel.split(x, dim=1)                          # this rank's tokens
    code = parallel.encode(enc, q, k, x=x)                # as enc(q, k, x=x) on the whole sequence
    y = parallel.attend(code.q, code.k, v, bias=code.bias)

Letters: B batch, H query heads, T tokens of this rank, N ranks; the sequence has N T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention.pruning import Prune
from ..bias import NO_BIAS, Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, parts_of
from ..bias.base import join
from ..encodings import Encoded, Encoding
from ..encodings.base import Composite, State
from ..precision import exact_dtype
from .over_ring import Attention, Crossings, over_ring
from .path import paths_of
from .ring import Ring

KINDS = (NoBias, SlopeTerm, SlopeBias, PathBias, DistanceBias)


class ContextParallel:
    """Causal attention over a sequence whose tokens are divided among the N ranks of a process group.

    It supports slopes, path integrals and tables of distances; windows, sinks and documents raise a ValueError.

    The sequence is cut into 2N equal chunks, and rank r holds chunks r and 2N-1-r, which gives all ranks the same work.
    Keys, values and the key-side tensors of the bias go round from rank to rank; the softmax over all of them is
    merged by logsumexp. In the backward pass they go round again with their gradients. Results and gradients are
    deterministic. All ranks must call the same methods in the same order.

    Args:
        group: a process group of `torch.distributed`; all ranks by default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "context parallelism needs torch.distributed: start with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self.ring = Ring(group, dist.get_rank(group), dist.get_world_size(group))
        self._agreed: set[str] = set()

    def tokens(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """(T,): the places in a sequence of `length` tokens of those that this rank holds."""
        chunks = self.ring.chunks
        if length % chunks or length < 2 * chunks:
            raise ValueError(
                f"a sequence over {self.ring.size} ranks is cut into {chunks} chunks of at least 2 tokens: its length "
                f"must be a multiple of {chunks} and at least {2 * chunks}, got {length}; pad or shorten it"
            )
        of_chunk = torch.arange(length, device=device).view(chunks, -1)
        return of_chunk[list(self.ring.held(self.ring.rank))].flatten()

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that holds the whole sequence along `dim`."""
        return x.index_select(dim, self.tokens(x.shape[dim], x.device))

    @torch.compiler.disable
    def encode(
        self,
        encoding: Encoding,
        q: Tensor,
        k: Tensor,
        *,
        x: Tensor | None = None,
        v: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Encoded:
        """What the encoding makes of this rank's tokens as parts of the whole sequence.

        All arguments hold this rank's tokens; `positions` are by default their places in the whole sequence. A running
        sum (FoX, grape-m-ctx) starts at the sum of all chunks before, for which its last values are gathered from all
        ranks; such an encoding is called three times.
        """
        length = self._checked_length(q)
        if positions is None and encoding.coords == 1:
            positions = self.tokens(length * self.ring.size, q.device)
        code = encoding(q, k, x=x, v=v, positions=positions)
        if code.state is None:
            return code
        check_adds(encoding, code.state)
        before = _mapped(lambda state: self._sums_before(state, length), code.state)

        def of_chunk(i: int) -> Encoded:
            first, half = i * length // 2, length // 2
            at = None if positions is None else positions.narrow(-min(encoding.coords, 2), first, half)
            return encoding(
                q.narrow(2, first, half),
                k.narrow(2, first, half),
                x=None if x is None else x.narrow(1, first, half),
                v=None if v is None else v.narrow(2, first, half),
                positions=at,
                state=_mapped(lambda sums: sums[i], before),
            )

        first, second = of_chunk(0), of_chunk(1)
        q, k = torch.cat([first.q, second.q], 2), torch.cat([first.k, second.k], 2)
        return Encoded(q, k, joined(first.bias, second.bias))

    @torch.compiler.disable
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Bias | None = None,
        window: int | None = None,
        sinks: int = 0,
        documents: Tensor | None = None,
        scale: float | None = None,
        prune: Prune = "auto",
        impl: str = "auto",
    ) -> Tensor:
        """Causal `grape.attend` of this rank's queries over the keys of all ranks: (B, H, T, Dv).

        Args:
            q, k, v, bias: of this rank's tokens; `encode` makes them.
            window, sinks, documents: refused.
            scale, prune, impl: as for `grape.attend`, for each block.
        """
        bias = NO_BIAS if bias is None else bias
        check_supported(bias, {"window": window, "sinks": sinks or None, "documents": documents})
        length = self._checked_length(q)
        if k.shape[2] != length or v.shape[2] != length:
            raise ValueError(
                f"every rank needs as many keys as queries, its own; got {length} queries, {k.shape[2]} keys and "
                f"{v.shape[2]} values"
            )
        bias.check(q.shape[0], q.shape[1], length, length)
        self._agree(q, k, v, *bias.tensors().values())
        rows, paths = [q], paths_of(bias)
        if paths:
            views, traces = zip(*(([path.probe_q, path.rate], path.probe_k) for path in paths), strict=True)
            crossings = Crossings(self.ring, paths, q.shape[0], impl)
            (each,) = over_ring(crossings, [x for pair in views for x in pair], traces)
            rows.append(after(each))
        work = Attention(self.ring, bias, q.shape[-1] ** -0.5 if scale is None else scale, prune, impl)
        out, _ = over_ring(
            work, [*rows, *bias.query_tensors().values()], [k, v, *bias.key_tensors().values()]
        )
        return out.to(v.dtype)

    @torch.compiler.disable
    def shift(self, module: nn.Module, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """KV-shift of this rank's tokens: each chunk begins with the last token of the one before it."""
        ends = [y.unflatten(2, (2, -1))[:, :, :, -1:].movedim(2, 0) for y in (k, v)]  # (2, B, Hkv, 1, D)
        before = [self.ring.before(y) for y in ends]
        chunks = zip(k.chunk(2, 2), v.chunk(2, 2), x.chunk(2, 1), *before, strict=True)
        mixed = [module(k, v, x, (last_k, last_v))[:2] for k, v, x, last_k, last_v in chunks]
        return torch.cat([each[0] for each in mixed], 2), torch.cat([each[1] for each in mixed], 2)

    def _checked_length(self, q: Tensor) -> int:
        if q.dim() != 4 or q.shape[2] % 2 or q.shape[2] < 4:
            raise ValueError(
                "q must be (B, H, T, D) with this rank's tokens, two chunks of at least 2 (ContextParallel.split "
                f"makes them), got shape {tuple(q.shape)}"
            )
        return q.shape[2]

    def _agree(self, *tensors: Tensor) -> None:
        """Raise in every rank if one has other shapes: their messages would not fit. Asked once for each shape."""
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        if shapes in self._agreed:
            return
        told: list[Any] = [None] * self.ring.size
        dist.all_gather_object(told, shapes, group=self.ring.group)
        odd = [rank for rank, each in enumerate(told) if each != told[0]]
        if odd:
            raise ValueError(
                f"all ranks must hold tensors of the same shapes and dtypes, got [{told[0]}] in rank 0 and "
                f"[{told[odd[0]]}] in rank {odd[0]}; pad the batch or the sequence"
            )
        self._agreed.add(shapes)

    def _sums_before(self, state: Tensor, length: int) -> Tensor:
        """(2, B, n, 1): for our two chunks the sum before them, from running sums over one after the other."""
        middle, end = state[..., -length // 2 - 1], state[..., -1]
        return self.ring.before(torch.stack([middle, end - middle]), summed=True).unsqueeze(-1)


def check_supported(bias: Bias, masks: Mapping[str, Any]) -> None:
    """Raise if attention with these cannot be split over devices."""
    for name, given in masks.items():
        if given is not None:
            raise ValueError(
                f"context parallelism has causal attention without further masks, got {name}; leave it out, or use "
                "grape.attend with the sequence on one device"
            )
    for part in parts_of(bias):
        if not isinstance(part, KINDS):
            raise ValueError(
                f"context parallelism cannot split a {type(part).__name__}, a function of token indices on one device; "
                "it has biases of slopes, paths and distances"
            )


def check_adds(encoding: Encoding, state: State) -> None:
    """Raise unless all states are running sums: others cannot be continued from totals."""
    if isinstance(encoding, Composite):
        for part, each in zip(encoding.parts.values(), state, strict=True):
            check_adds(part, each)  # type: ignore[arg-type]
    elif state is not None and not encoding.state_adds:
        raise ValueError(
            f"context parallelism cannot continue the state of {type(encoding).__name__} from one device to the next, "
            "because it is not a running sum; if it is one, set the class attribute state_adds = True"
        )


def _mapped(change: Callable[[Tensor], Tensor], state: State) -> State:
    if isinstance(state, tuple):
        return tuple(_mapped(change, each) for each in state)
    return None if state is None else change(state)


def joined(first: Bias, second: Bias) -> Bias:
    """The bias of two chunks of tokens; what the queries of a chunk share is the same for both."""
    other = second.tensors()
    tensors = {name: x if x.shape[2] == 1 else join(x, other[name]) for name, x in first.tensors().items()}
    return first.replaced(tensors)


def after(each: Tensor) -> Tensor:
    """(…, 2N): from what each chunk adds, the sum over the chunks after it."""
    later = each.to(exact_dtype(each.device)).flip(-1).cumsum(-1).flip(-1)
    return torch.cat([later[..., 1:], torch.zeros_like(later[..., :1])], -1).to(each.dtype)
