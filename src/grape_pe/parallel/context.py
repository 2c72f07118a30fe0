"""`ContextParallel`: attention over sequences whose tokens are split over several devices.

    parallel = ContextParallel(group)                     # in every rank; None: all ranks
    x = parallel.split(x, dim=1)                          # this rank's tokens
    code = parallel.encode(enc, q, k, x=x)                # as enc(q, k, x=x) on the whole sequence
    y = parallel.attend(code.q, code.k, v, bias=code.bias)

Letters: B batch, H query heads, T tokens of this rank, N ranks; the sequence has N T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention.pruning import Prune
from ..bias import NO_BIAS, Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, parts_of
from ..bias.base import join
from ..encodings import Encoded, Encoding
from ..encodings.base import Composite, State, map_state
from ..precision import exact_dtype
from .over_ring import Attention, Crossings, over_ring
from .path import paths_of
from .ring import Ring

KINDS = (NoBias, SlopeTerm, SlopeBias, PathBias, DistanceBias)


class ContextParallel:
    """Causal attention over sequences whose tokens are split over the N ranks of a process group.

    It supports all rotations, and biases of slopes, paths and distances. Windows, sinks and documents raise a
    ValueError.

    Each sequence is cut into 2N equal chunks. Rank r has chunks r and 2N-1-r, so all ranks do the same work. Keys,
    values and key-side bias tensors are passed from rank to rank in a ring, and the softmax is merged by logsumexp. The
    backward pass passes them around again, with their gradients. Results and gradients are deterministic. All ranks
    must call the same methods in the same order.

    Args:
        group: a process group of `torch.distributed`; all ranks by default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "context parallelism needs torch.distributed, which is not initialized; start with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self.ring = Ring(group, dist.get_rank(group), dist.get_world_size(group))
        self._agreed: set[str] = set()

    def tokens(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Indices of this rank's tokens in a sequence of `length` tokens, (T,).

        Args:
            length: tokens of the whole sequence, a multiple of 2N and at least 4N.
            device: device of the result.
        """
        chunks = self.ring.chunks
        if length % chunks or length < 2 * chunks:
            raise ValueError(
                f"the length of a sequence over {self.ring.size} ranks must be a multiple of {chunks} and at least "
                f"{2 * chunks}, got {length}; pad or shorten the sequence"
            )
        of_chunk = torch.arange(length, device=device).view(chunks, -1)
        return of_chunk[list(self.ring.chunks_of(self.ring.rank))].flatten()

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Select this rank's tokens of x, which has the whole sequence along `dim`."""
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
        """Encode this rank's tokens as parts of the whole sequence.

        A running sum (FoX, grape-m-ctx) continues from the sum over all chunks before, which is gathered from all
        ranks; such an encoding is called three times.

        Args:
            encoding: the encoding.
            q: queries of this rank, (B, H, T, D).
            k: keys of this rank, (B, Hkv, T, D).
            x: the attention block's input of this rank, (B, T, C); needed by contextual encodings only.
            v: values of this rank, (B, Hkv, T, Dv); needed by `grape-ap` with probe="v" only.
            positions: positions of this rank's tokens; by default their indices in the whole sequence.

        Returns:
            Encoded q and k, and the bias, for `attend`.
        """
        length = self._checked_length(q)
        if positions is None and encoding.coords == 1:
            positions = self.tokens(length * self.ring.size, q.device)
        code = encoding(q, k, x=x, v=v, positions=positions)
        if code.state is None:
            return code
        check_adds(encoding, code.state)
        before = map_state(lambda state: self._sums_before(state, length), code.state)

        def of_chunk(i: int) -> Encoded:
            first, half = i * length // 2, length // 2
            at = None if positions is None else positions.narrow(-min(encoding.coords, 2), first, half)
            return encoding(
                q.narrow(2, first, half),
                k.narrow(2, first, half),
                x=None if x is None else x.narrow(1, first, half),
                v=None if v is None else v.narrow(2, first, half),
                positions=at,
                state=map_state(lambda sums: sums[i], before),
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
        """Causal attention of this rank's queries over the keys of all ranks.

        Args:
            q: encoded queries of this rank, (B, H, T, D).
            k: encoded keys of this rank, (B, Hkv, T, D).
            v: values of this rank, (B, Hkv, T, Dv).
            bias: the bias of this rank's tokens, from `encode`.
            window: must be None.
            sinks: must be 0.
            documents: must be None.
            scale: factor of <q, k>; 1/sqrt(D) by default.
            prune: as for `grape.attend`.
            impl: as for `grape.attend`.

        Returns:
            The attention output of this rank's queries, (B, H, T, Dv).
        """
        bias = NO_BIAS if bias is None else bias
        check_supported(bias, {"window": window, "sinks": sinks or None, "documents": documents})
        length = self._checked_length(q)
        if k.shape[2] != length or v.shape[2] != length:
            raise ValueError(
                f"q, k and v must have this rank's tokens, got {length} queries, {k.shape[2]} keys and "
                f"{v.shape[2]} values; split all of them with ContextParallel.split"
            )
        bias.check(q.shape[0], q.shape[1], length, length)
        self._agree(q, k, v, *bias.tensors().values())
        rows, paths = [q], paths_of(bias)
        if paths:
            of_queries = [x for path in paths for x in (path.probe_q, path.rate)]
            crossings = Crossings(self.ring, paths, q.shape[0], impl)
            (each,) = over_ring(crossings, of_queries, [path.probe_k for path in paths])
            rows.append(after(each))
        work = Attention(self.ring, bias, q.shape[-1] ** -0.5 if scale is None else scale, prune, impl)
        out, _ = over_ring(
            work, [*rows, *bias.query_tensors().values()], [k, v, *bias.key_tensors().values()]
        )
        return out.to(v.dtype)

    @torch.compiler.disable
    def shift(self, module: nn.Module, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Apply a `KVShift` to this rank's tokens. Each chunk continues from the last token of the chunk before."""
        ends = [y.unflatten(2, (2, -1))[:, :, :, -1:].movedim(2, 0) for y in (k, v)]  # (2, B, Hkv, 1, D)
        before = [self.ring.before(y) for y in ends]
        chunks = zip(k.chunk(2, 2), v.chunk(2, 2), x.chunk(2, 1), *before, strict=True)
        mixed = [module(k, v, x, (last_k, last_v))[:2] for k, v, x, last_k, last_v in chunks]
        return torch.cat([each[0] for each in mixed], 2), torch.cat([each[1] for each in mixed], 2)

    def _checked_length(self, q: Tensor) -> int:
        if q.dim() != 4 or q.shape[2] % 2 or q.shape[2] < 4:
            raise ValueError(
                "q must have shape (B, H, T, D), with an even number T >= 4 of this rank's tokens (see "
                f"ContextParallel.split), got {tuple(q.shape)}"
            )
        return q.shape[2]

    def _agree(self, *tensors: Tensor) -> None:
        """Raise a ValueError in all ranks if their shapes or dtypes differ. Equal shapes are checked only once."""
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        if shapes in self._agreed:
            return
        gathered: list[Any] = [None] * self.ring.size
        dist.all_gather_object(gathered, shapes, group=self.ring.group)
        odd = [rank for rank, each in enumerate(gathered) if each != gathered[0]]
        if odd:
            raise ValueError(
                f"all ranks must have tensors of the same shapes and dtypes, got [{gathered[0]}] in rank 0 and "
                f"[{gathered[odd[0]]}] in rank {odd[0]}; pad the batch or the sequence"
            )
        self._agreed.add(shapes)

    def _sums_before(self, state: Tensor, length: int) -> Tensor:
        """The sums over all tokens before this rank's two chunks, (2, B, n, 1), from its running sums."""
        middle, end = state[..., -length // 2 - 1], state[..., -1]
        return self.ring.before(torch.stack([middle, end - middle]), summed=True).unsqueeze(-1)


def check_supported(bias: Bias, masks: Mapping[str, Any]) -> None:
    """Raise a ValueError if attention with this bias and these masks cannot be split over devices."""
    for name, given in masks.items():
        if given is not None:
            raise ValueError(
                f"context parallelism supports causal attention without further masks, got {name}; leave it out, or "
                "use grape.attend with the sequence on one device"
            )
    for part in parts_of(bias):
        if not isinstance(part, KINDS):
            raise ValueError(
                f"context parallelism cannot split a {type(part).__name__}, only biases of slopes, paths and "
                "distances; use grape.attend with the sequence on one device"
            )


def check_adds(encoding: Encoding, state: State) -> None:
    """Raise a ValueError unless all states are running sums, which can continue from a total."""
    if isinstance(encoding, Composite):
        for part, each in zip(encoding.parts.values(), state, strict=True):
            check_adds(part, each)  # type: ignore[arg-type]
    elif state is not None and not encoding.state_adds:
        raise ValueError(
            f"context parallelism cannot continue the state of {type(encoding).__name__} from one device to the next; "
            "if the state is a running sum, set the class attribute state_adds = True"
        )


def joined(first: Bias, second: Bias) -> Bias:
    """Join the biases of two chunks of tokens. Tensors that all queries share are equal in both."""
    other = second.tensors()
    tensors = {name: x if x.shape[2] == 1 else join(x, other[name]) for name, x in first.tensors().items()}
    return first.replaced(tensors)


def after(each: Tensor) -> Tensor:
    """For each of the 2N chunks, along the last axis, the sum of `each` over the chunks after it."""
    later = each.to(exact_dtype(each.device)).flip(-1).cumsum(-1).flip(-1)
    return torch.cat([later[..., 1:], torch.zeros_like(later[..., :1])], -1).to(each.dtype)
