"""Compilation of blocks, and replication (ddp) or sharding (fsdp) of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ...encodings import Encoding
from ...models import Decoder
from ..config import TrainSection
from .distributed import World

#: Inputs are never cast: FSDP would round the positions of a `Layout` as well.
FULL = MixedPrecisionPolicy(cast_forward_inputs=False)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def spread(model: nn.Module, settings: TrainSection, among: World) -> nn.Module:
    """The model on one rank, or replicated (ddp) or sharded (fsdp) on several."""
    model.to(among.device)
    model.gradient_checkpointing = settings.recompute  # type: ignore[assignment]
    if settings.compile:
        compile_blocks(model)
    if among.size == 1:
        return model
    if settings.strategy == "ddp":
        return DistributedDataParallel(
            model, device_ids=None if among.device.type == "cpu" else [among.device]
        )
    assert isinstance(model, Decoder)
    # sharded over groups of ranks and replicated over the groups
    shape = (among.size // (settings.shard or among.size), settings.shard or among.size)
    mesh = init_device_mesh(among.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh, half=settings.precision == "bf16")


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block's `forward`, which keeps the hooks of FSDP outside the graph.

    All blocks of a `Decoder` share one graph, which compiles faster than the whole model.
    """
    if not isinstance(model, Decoder):
        model.compile(backend=backend)
        return
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=backend)


def shard(model: Decoder, mesh: DeviceMesh, half: bool) -> Decoder:
    """FSDP2 with one unit per block, one for the encodings of all layers, and one for the rest.

    With `half`, weights are gathered and multiplied in bfloat16 and gradients are summed in float32. Parameters of
    encodings stay float32, as rounding would change frequencies. They are gathered once, at the start of the trunk,
    so that blocks have no collective of their own.

    Units are made from the outside in: `fully_shard` excludes modules that are units already.
    """
    policy, trunk = HALF if half else FULL, model.model
    fully_shard(
        model, mesh=mesh, mp_policy=policy, ignored_params={*trunk.layers.parameters()} | _of_encodings(model)
    )
    others = set(trunk.parameters()) - _of_encodings(model)
    if _of_encodings(model):
        fully_shard(trunk, mesh=mesh, mp_policy=FULL, ignored_params=others, reshard_after_forward=False)
    for block in trunk.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=_of_encodings(model))
    return model


def _of_encodings(model: Decoder) -> set[nn.Parameter]:
    """Parameters of encodings; `fully_shard` replaces them, so this is called again after it."""
    return {p for part in model.modules() if isinstance(part, Encoding) for p in part.parameters()}


@contextmanager
def gradients_exchanged(model: nn.Module, now: bool) -> Iterator[None]:
    """Exchange gradients in this backward pass, or accumulate them for a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        yield
    elif isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield
