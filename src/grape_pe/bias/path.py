"""`PathBias`, the path integral of GRAPE-AP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_choice
from ..groups import PlaneRotation
from ..precision import exact_dtype, without_autocast, working_dtype
from .base import Bias, check_lengths, check_tail, check_tensor

Link = Literal["logsigmoid", "bounded"]
ProbeRotation = Literal["key", "relative", "none"]

# Links g of Eq. P1: increasing, 1-Lipschitz, negative. "bounded" is sigmoid - 1, so |edge| is at most its rate.
LINKS: dict[Link, Callable[[Tensor], Tensor]] = {
    "logsigmoid": F.logsigmoid,
    "bounded": lambda z: -torch.sigmoid(-z),
}


@dataclass(frozen=True, eq=False)
class PathBias(Bias):
    """The path integral of GRAPE-AP: the sum of rate_h * g(<p_t, P_l> / P) over tokens l = j+1 … t (Eq. P2).

    The sum is empty (zero) for j >= t.

    Args:
        probe_q: (B, Hp, Tq, P), the query probes p, with Hp a divisor of H.
        probe_k: (B, Hp, Tk, P), the key probes P_l, already rotated.
        rate: (1, H, 1).
        link: g, "logsigmoid" or "bounded".
        rotation: which probes are rotated by their position: "key", "relative" (both) or "none" (Eq. P3).
    """

    probe_q: Tensor
    probe_k: Tensor
    rate: Tensor
    link: Link = "logsigmoid"
    rotation: ProbeRotation = "none"

    def __post_init__(self) -> None:
        check_choice("link", self.link, LINKS)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_lengths(self.probe_q.shape[2], self.probe_k.shape[2], queries, keys)
        probes, features = self.probe_q.shape[1], self.probe_q.shape[-1]
        if probes == 0 or heads % probes:
            raise ValueError(f"the number of probe heads must divide the {heads} query heads, got {probes}")
        check_tensor("probe_q", self.probe_q, (1, batch), (probes,), (queries,), (features,))
        check_tensor("probe_k", self.probe_k, (1, batch), (probes,), (keys,), (features,))
        check_tensor("rate", self.rate, (1,), (heads,), (1,))

    def query_tensors(self) -> dict[str, Tensor]:
        return {"probe_q": self.probe_q, "rate": self.rate}

    def key_tensors(self) -> dict[str, Tensor]:
        return {"probe_k": self.probe_k}

    def replaced(self, tensors: Mapping[str, Tensor]) -> PathBias:
        return replace(self, **tensors)  # type: ignore[arg-type]

    def queries(self, rows: slice) -> PathBias:
        check_tail("queries", rows, self.query_length)
        return replace(self, probe_q=self.probe_q[:, :, rows])

    def rebased(self, offset: float) -> PathBias:
        if self.rotation == "none":
            return self
        if self.rotation == "key":
            raise ValueError(
                'the bias of grape-ap with probe_rotation="key" depends on absolute positions, so cached keys cannot '
                'be moved; use probe_rotation="relative"'
            )
        width = self.probe_k.shape[-1]
        device = self.probe_k.device
        angle = torch.full((width // 2,), -float(offset), dtype=exact_dtype(device), device=device)
        turn = PlaneRotation.from_angle(angle, self.probe_k.dtype)
        return replace(self, probe_k=turn.apply(self.probe_k))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        shift = self.probe_k.shape[2] - self.probe_q.shape[2]
        t = torch.arange(rows.start + shift, rows.stop + shift, device=self.rate.device).unsqueeze(-1)
        return self.sums(rows, cols, t, max(rows.stop + shift, cols.stop + 1))

    def row(self, keys: int) -> Tensor:
        return self.sums(slice(0, 1), slice(0, keys), None, keys)

    def sums(self, rows: slice, cols: slice, t: Tensor | None, end: int) -> Tensor:
        """b[rows, cols] for queries at tokens t, (…, rows, 1), all below `end`; None if they follow all keys."""
        probes = self.probe_k[:, :, cols.start + 1 : end]
        wide = working_dtype(torch.promote_types(self.probe_q.dtype, probes.dtype))
        with without_autocast(probes):
            query = self.probe_q[:, :, rows].to(wide) / probes.shape[-1]
            edge = LINKS[self.link](query @ probes.transpose(-1, -2).to(wide))
        if t is not None:
            token = torch.arange(cols.start + 1, cols.start + 1 + probes.shape[2], device=t.device)
            edge = edge.masked_fill(token > t, 0.0)
        # Cumulative sums from the right: the entry of l = j + 1, at column j - cols.start, is the sum for key j.
        total = edge.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).to(wide)
        width = cols.stop - cols.start
        total = F.pad(total[..., :width], (0, max(0, width - total.shape[-1])))
        repeat = self.rate.shape[1] // total.shape[1]
        return self.rate.unsqueeze(-1) * (total if repeat == 1 else total.repeat_interleave(repeat, 1))
