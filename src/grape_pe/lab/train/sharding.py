"""The model on its ranks: compiled block by block, then replicated (ddp) or sharded (fsdp)."""

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
    """The model as the ranks share it: whole on one, replicated (ddp) or sharded (fsdp) on several."""
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
    return shard(model, _mesh(settings.shard or among.size, among), half=settings.precision == "bf16")


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block's `forward`, so that the hooks of FSDP stay outside of its graph.

    All blocks of a `Decoder` share one graph, which also takes less time than compiling the model whole.
    """
    if not isinstance(model, Decoder):
        model.compile(backend=backend)
        return
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=backend)


def shard(model: Decoder, mesh: DeviceMesh, half: bool) -> Decoder:
    """FSDP2: a unit each block, one for the encodings of all layers, one for the rest.

    With `half`, weights are gathered and multiplied in bfloat16 and gradients are summed in float32. The
    encodings' parameters stay float32: a rounded frequency is another frequency. They are gathered once, at
    the start of the trunk, so that no collective stands inside a block.

    Units are made from the outside in, because `fully_shard` leaves out modules that are units already,
    with all their parameters.
    """
    policy, trunk = HALF if half else FULL, model.model
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=_of_blocks(model) | _of_encodings(model))
    others = set(trunk.parameters()) - _of_encodings(model)
    if _of_encodings(model):
        fully_shard(trunk, mesh=mesh, mp_policy=FULL, ignored_params=others, reshard_after_forward=False)
    for block in trunk.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=_of_encodings(model))
    return model


def _of_blocks(model: Decoder) -> set[nn.Parameter]:
    return set(model.model.layers.parameters())


def _of_encodings(model: Decoder) -> set[nn.Parameter]:
    """Asked for again after each `fully_shard`, which replaces parameters."""
    return {p for part in model.modules() if isinstance(part, Encoding) for p in part.parameters()}


def _mesh(shard: int, among: World) -> DeviceMesh:
    """Sharded over groups of `shard` ranks, replicated over the groups: one group is plain FSDP."""
    shape = (among.size // shard, shard)
    return init_device_mesh(among.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextmanager
def gradients_exchanged(model: nn.Module, now: bool) -> Iterator[None]:
    """Exchange gradients in this backward pass, or leave them to a later one (accumulation)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        yield
    elif isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield
