"""FSDP units: what is rounded to bfloat16, what stays float32, and that blocks compile with their hooks outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("pydantic")

from grape_pe.encodings import Encoding
from grape_pe.encodings.frequencies import Frequencies
from grape_pe.lab.config import load
from grape_pe.lab.train.optimization import initialise
from grape_pe.lab.train.sharding import compile_blocks, shard
from grape_pe.models import Decoder
from grape_pe.testing import assert_close

ENCODINGS = ["rope", "grape-m+grape-ap", "fox", "grape-a-qk"]
SIZES = {"model.width": 32, "model.heads": 2, "model.layers": 3, "model.kv_shift": True}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(encoding: str, **changes: object) -> Decoder:
    built = Decoder(load("demo", {**SIZES, "model.encoding": encoding, **changes}).model.decoder(64))
    initialise(built, 0)
    with torch.no_grad():
        for part in built.modules():
            if isinstance(part, Frequencies) and part.delta is not None:
                part.delta += 0.3  # no bfloat16 number
    return built


def mesh() -> object:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (2, 600), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(600) >= 20).long().expand(2, -1)
    return {"tokens": ids, "targets": ids.roll(-1, 1), "documents": documents}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_matrices_are_halved_and_encodings_are_not(encoding: str) -> None:
    """What each module's forward sees, against the float32 values before. Positions in float32 stay as well."""
    whole = model(encoding)
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}
    split = shard(model(encoding), mesh(), half=True)
    seen: dict[str, torch.Tensor] = {}

    def note(part: torch.nn.Module, name: str) -> None:
        def hook(*_: object) -> None:
            for short, p in part.named_parameters(recurse=False):
                seen[f"{name}.{short}"] = p.detach().clone()

        part.register_forward_pre_hook(hook)

    for name, part in split.named_modules():
        note(part, name)
    split(**tokens(), positions=torch.arange(600.0)).backward()
    mine = {
        f"{n}.{k}"
        for n, m in split.named_modules()
        if isinstance(m, Encoding)
        for k, _ in m.named_parameters()
    }
    assert mine <= values.keys()
    for name, value in seen.items():
        if name in mine:
            assert value.dtype == torch.float32 and torch.equal(value, values[name]), name
        else:
            assert torch.equal(value, values[name].bfloat16()), name
    for name, p in split.named_parameters():
        assert p.dtype == torch.float32 and (p.grad is None or p.grad.dtype == torch.float32), name


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("half", [False, True])
def test_loss_and_gradients_are_those_of_one_process(encoding: str, half: bool) -> None:
    whole, split = model(encoding), shard(model(encoding), mesh(), half)
    losses = [each(**tokens()) for each in (whole, split)]
    for loss in losses:
        loss.backward()
    dtype = torch.bfloat16 if half else torch.float32
    assert_close(losses[1].detach(), losses[0].detach(), dtype, "loss")
    if half:
        return
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad, dtype, name)


@pytest.mark.parametrize("encoding", ["grape-m+grape-ap", "grape-a-qk"])
def test_all_blocks_share_one_graph_without_a_break(encoding: str) -> None:
    """Compiled, sharded, halved and recomputed at once; traced by dynamo without generating code."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    plain, split = (model(encoding, **{"model.layers": 10}) for _ in range(2))
    for part in (plain, split):
        part.gradient_checkpointing = True
    compile_blocks(split, backend=count)
    shard(plain, mesh(), half=True)
    shard(split, mesh(), half=True)
    for each in (plain, split):
        each(**tokens()).backward()
    assert len(graphs) == 1 and not torch._dynamo.utils.counters["graph_break"]
    for (name, ours), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor(), torch.bfloat16, name)
