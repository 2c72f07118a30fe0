"""Encodings on several gloo ranks and on one process: outputs and all gradients, over the whole sequence."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import grape_pe as grape
from grape_pe import testing
from grape_pe.parallel import ContextParallel

CASES: dict[str, dict[str, Any]] = {
    "nope": {},
    "rope": {},
    "alibi": {},
    "fox": {},
    "grape-a-qk": {},
    "grape-a-phase": {},
    "grape-ap": {},
    "rope+grape-ap+fox": {},
    "grape-m-ctx+grape-ap": {},
    "t5": {},
    "kerple-log": {},
    "relative": {},
}
TOKENS, WIDTH = 48, 16
DTYPES = torch.float64, torch.float32


def build(name: str, dtype: torch.dtype) -> tuple[grape.Encoding, testing.Sample]:
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, kv_heads=2, head_dim=8, width=WIDTH, **CASES[name])
    with torch.no_grad():
        testing.moved(enc)
    return enc.to(dtype), testing.sample(enc.to(dtype), tokens=TOKENS, dtype=dtype, seed=3)


def learn(name: str, dtype: torch.dtype, parallel: ContextParallel | None, impl: str = "auto") -> dict[str, Tensor]:
    """The output and the gradients of q, k, v, x and all parameters; of this rank's tokens, and its share of the last."""
    enc, data = build(name, dtype)
    towards = torch.randn(data.v.shape[0], 4, TOKENS, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    dims = {"x": 1, "q": 2, "k": 2, "v": 2}
    given = {n: getattr(data, n) for n in dims} | {"towards": towards}
    if parallel is not None:
        given = {n: parallel.split(t, dims.get(n, 2)) for n, t in given.items()}
    towards = given.pop("towards")
    x, q, k, v = (given[n].detach().requires_grad_() for n in "xqkv")
    if parallel is None:
        code = enc(q, k, x=x, v=v)
        y = grape.attend(code.q, code.k, v, bias=code.bias, impl=impl)
    else:
        code = parallel.encode(enc, q, k, x=x, v=v)
        y = parallel.attend(code.q, code.k, v, bias=code.bias, impl=impl)
    (y * towards).sum().backward()
    leaves = {"x": x, "q": q, "k": k, "v": v, **dict(enc.named_parameters(prefix="enc"))}
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found: dict[Any, Any] = {}
    parallel = ContextParallel()
    for name in CASES:
        for dtype in DTYPES:
            try:
                found[name, dtype] = learn(name, dtype, parallel), learn(name, dtype, parallel)
            except Exception:  # the other ranks fail as well, or the test hangs and says so
                found[name, dtype] = traceback.format_exc()
    found["uneven"] = refusal(lambda: parallel.attend(*torch.zeros(3, 1, 1, 4 if rank else 6, 2)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def on_ranks(size: int, folder: Path) -> list[dict[Any, Any]]:
    """What each rank found."""
    mp.spawn(_rank, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
