"""Encodings on several gloo ranks and on one process: outputs and all gradients, over the whole sequence."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import grape_pe as grape
from grape_pe import testing
from grape_pe.models import Decoder, DecoderConfig
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
HOW = "plain", "recomputed", "ddp", "fsdp"
TOKENS, WIDTH = 48, 16
#: by the number of ranks
DTYPES = {2: (torch.float64, torch.float32, torch.bfloat16), 3: (torch.float64,)}


def build(name: str, dtype: torch.dtype) -> tuple[grape.Encoding, testing.Sample]:
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, kv_heads=2, head_dim=8, width=WIDTH, **CASES[name])
    with torch.no_grad():
        testing.moved(enc)
    return enc.to(dtype), testing.sample(enc.to(dtype), tokens=TOKENS, dtype=dtype, seed=3)


def learn(
    name: str, dtype: torch.dtype, parallel: ContextParallel | None, impl: str = "auto"
) -> dict[str, Tensor]:
    """The output and the gradients of q, k, v, x of this rank's tokens, and its share of the parameters' gradients."""
    enc, data = build(name, dtype)
    towards = torch.randn(
        data.v.shape[0], 4, TOKENS, 8, generator=torch.Generator().manual_seed(1), dtype=dtype
    )
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


def learn_language(parallel: ContextParallel | None, how: str = "") -> dict[str, Tensor]:
    """A decoder with KV-shift: its loss over all targets and the gradients, of this rank its share.

    `how`: "recomputed", or "ddp" or "fsdp", which give every rank the mean of the ranks' gradients.
    """
    torch.manual_seed(0)
    sizes = {"width": 32, "layers": 2, "heads": 2, "vocab_size": 11, "kv_shift": True}
    model: Any = Decoder(DecoderConfig(**sizes, encoding="rope+fox+grape-ap")).double()
    model.gradient_checkpointing = how == "recomputed"
    ranks = dist.get_world_size() if how in ("ddp", "fsdp") else 1
    learner = DistributedDataParallel(model) if how == "ddp" else model
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    tokens = torch.randint(11, (2, TOKENS + 1), generator=torch.Generator().manual_seed(4))
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    count = targets.numel() / ranks
    if parallel is not None:
        tokens, targets = parallel.split(tokens), parallel.split(targets)
    loss = learner(tokens, targets=targets, count=count, parallel=parallel)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: (g.full_tensor() if isinstance(g, DTensor) else g) / ranks for n, g in grads.items()}
    return {"loss": loss.detach() / ranks} | whole


def most_saved(parallel: ContextParallel) -> int:
    """Elements that autograd keeps of one call of `attend`, in the largest tensor."""
    enc, data = build("fox", torch.float64)
    q, k, v, x = (parallel.split(t, dim) for t, dim in ((data.q, 2), (data.k, 2), (data.v, 2), (data.x, 1)))
    code = parallel.encode(enc, q, k, x=x)
    sizes: list[int] = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        parallel.attend(code.q, code.k, v.requires_grad_(), bias=code.bias)
    return max(sizes)


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    parallel, found = ContextParallel(), {}
    for name in CASES:
        for dtype in DTYPES[size]:
            found[name, dtype] = answer(lambda n=name, d=dtype: learn(n, d, parallel))
    found["again"] = answer(lambda: learn("rope+grape-ap+fox", torch.float64, parallel))
    for how in HOW:
        found[how] = answer(lambda h=how: learn_language(parallel, h))
    found["most saved"] = answer(lambda: most_saved(parallel))
    found["uneven"] = answer(lambda: parallel.attend(*torch.zeros(3, 1, 1, 4 if rank else 6, 2)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def answer(call: Callable[[], Any]) -> Any:
    """Or the error as text: a rank that stopped would leave the others waiting."""
    try:
        return call()
    except Exception:
        return traceback.format_exc()


def on_ranks(size: int, folder: Path) -> list[dict[Any, Any]]:
    """What each rank found."""
    mp.spawn(_rank, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
