"""`grape doctor --tune`: which tiles of the Triton kernels are fastest on this GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...attention.gpu import tune
from ...attention.gpu.api import why_not_device
from ...attention.gpu.store import Case
from .checks import BIASES, Plan
from .machine import scrub


def rows(device: str, what: Plan, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One row for each dtype, head size and bias: `status` is kept, failed or refused."""
    for dtype, heads, bias in itertools.product(what.dtypes, what.heads, BIASES):
        progress(f"{device}, {dtype}, heads of {heads}, bias {bias}: timing tiles")
        row = {"device": device, "dtype": dtype, "head_dim": heads, "bias": bias}
        refusal = why_not_device(torch.device(device), getattr(torch, dtype))
        if refusal is not None:
            yield row | {"status": "refused", "reason": scrub(refusal), "tiles": {}, "times": {}}
            continue
        found = tune.tune(torch.device(device), Case(dtype, heads, heads, bias, ()))
        status = "kept" if found.reason is None else "failed"
        reason = None if found.reason is None else scrub(found.reason)
        yield row | {"status": status, "reason": reason, "tiles": found.tiles, "times": found.times}
    progress("")


def lines(found: list[dict[str, Any]] | None, gpus: bool) -> Iterator[str]:
    """The part of the report about tiles; nothing unless they were asked for."""
    if found is None:
        return
    yield ""
    yield "Tiles of the Triton kernels (queries x keys / warps / stages, milliseconds; * is kept and used)"
    if not gpus:
        yield "  No GPU: there is nothing to time."
    for row in found:
        call = f"{row['device']}, {row['dtype']}, heads of {row['head_dim']}, bias {row['bias']}"
        yield f"  {call}" + (f": nothing kept. {row['reason']}" if row["status"] != "kept" else "")
        for kernel, times in row["times"].items():
            cells = (_cell(tile, time, row["tiles"].get(kernel)) for tile, time in times.items())
            yield f"    {kernel:<15}" + "   ".join(cells)


def _cell(tile: str, seconds: float, kept: list[int] | None) -> str:
    queries, keys, warps, stages = numbers = [int(n) for n in tile.split()]
    return f"{queries}x{keys}/{warps}/{stages} {1000 * seconds:.3f}{'*' if numbers == kept else ''}"
