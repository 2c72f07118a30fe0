"""The account of a run on paper, against counts of another kind: by hand, and by torch's own counter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("pydantic")

from grape_pe.cli import main
from grape_pe.lab import paper
from grape_pe.lab.config import load
from grape_pe.lab.train.estimate import Estimate, estimate, flops_per_token
from grape_pe.lab.train.sharding import gradients_exchanged, shard
from grape_pe.lab.train.step_time import GPUS, Work
from grape_pe.models import Decoder

V, C, L, T = 50304, 1024, 24, 4096


def medium(ranks: int = 8, **changes: object) -> Estimate:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return estimate(load("paper-medium", dotted), V, ranks)


def test_the_medium_model_by_hand() -> None:
    hidden = 8 * C // 3
    block = 4 * C * C + 3 * C * hidden + 2 * C + 2 * 128
    said, parameters = medium(), L * block + V * C + C
    assert said.parameters == parameters
    matrices = L * (4 * C * C + 3 * C * hidden) + V * C
    assert said.flops_per_token == 6 * matrices + 6 * L * C * T
    memory = said.memory
    assert memory.weights == 4 * parameters / 8 and memory.optimizer == 8 * parameters / 8
    assert memory.gradients == 4 * parameters / 8 + 4 * parameters
    assert memory.gathered == 2 * (V * C + C + 2 * block)
    assert memory.activations == 5 * T * L * (12 * C + 4 * hidden) * 2
    assert said.messages.reduce_scatter == 7 / 8 * 4 * parameters
    assert said.messages.all_gather == 7 / 8 * 12 * 2 * (parameters + L * block)


def test_other_layouts_by_hand() -> None:
    parameters = medium().parameters
    alone, ddp, hybrid = medium(1), medium(train__strategy="ddp"), medium(32, train__shard=8)
    assert alone.messages.collectives == 0 and alone.memory.weights == 4 * parameters
    assert ddp.messages.all_reduce == 2 * 7 / 8 * 4 * parameters and ddp.memory.optimizer == 8 * parameters
    assert hybrid.messages.all_reduce == 2 * 3 / 4 * 4 * parameters / 8
    assert hybrid.memory.weights == 4 * parameters / 8 and hybrid.micro_batches == 3
    again = medium(train__recompute=True)
    assert again.memory.activations == medium().other_activations < medium().memory.activations / 10
    head, tokens = 6 * V * C, 480 * T / 8
    assert again.work.flops - medium().work.flops == pytest.approx(
        (medium().flops_per_token - head) * tokens / 3
    )


@pytest.mark.parametrize("encoding, shift", [("rope", False), ("fox", True)])
def test_flops_of_a_token_are_those_torch_counts(encoding: str, shift: bool) -> None:
    """torch's counter sees the layers' matrices; the head's loss and attention are operators of our own."""
    from torch.utils.flop_counter import FlopCounterMode

    changes = {"model.layers": 2, "model.encoding": encoding, "model.kv_shift": shift}
    model, length = Decoder(load("small", changes).model.decoder(2048)), 64
    config, ids = model.config, torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, targets=ids).backward()
    head, attention = 6 * config.vocab_size * config.width, 6 * config.layers * config.width * length
    assert counter.get_total_flops() / length == flops_per_token(model, length) - head - attention


def test_the_time_of_a_step_by_hand() -> None:
    """The slower of computing and sending; the network only where there are more ranks than a node has."""
    gpu = GPUS["H100"]
    work = Work(flops=1e14, moved=1e12, near=1e9, far=0.0, group=8, ranks=8)
    computing = 1e14 / (989e12 * 0.55) + 1e12 / (3.35e12 * 0.8)
    assert gpu.seconds(work) == pytest.approx(computing)
    slow = Work(flops=0.0, moved=0.0, near=1e9, far=2e9, group=8, ranks=16)
    assert gpu.seconds(slow) == pytest.approx((1e9 / 450e9 + 2e9 / 50e9) / 0.7)
    said = medium()
    assert said.hours("H100") == pytest.approx(gpu.seconds(said.work) * 25000 * 8 / 3600)
    assert said.mfu("H100") == pytest.approx(said.flops / (said.hours("H100") * 3600 * 989e12))
    assert 0.2 < said.mfu("H100") < gpu.products and 0.2 < said.mfu("A100") < GPUS["A100"].products


@pytest.mark.parametrize("size", ["medium", "large"])
def test_the_papers_recipes_fit_without_recomputation(size: str) -> None:
    """With a third of an 80 GB GPU to spare; and a micro-batch that divides the share of one to four nodes."""
    config = load(f"paper-{size}")
    assert not config.train.recompute and estimate(config, V, 8).memory.total < 80e9 * 2 / 3
    assert all(480 // ranks % config.train.micro_batch == 0 for ranks in (8, 16, 24, 32))


def test_the_rows_of_the_papers_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.name: row.arguments for row in paper.rows()}
    assert len(rows) == 13 + 10 and rows["large-alibi-kv"] == [
        "paper-large",
        "--encoding",
        "alibi",
        "--kv-shift",
    ]
    assert main(["recipes", "--rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[23].split()[:2] == ["23", "large-grape-ap-kv"] and lines[23].endswith("grape-ap --kv-shift")
    assert main(["train", *rows["large-alibi-kv"], "--dry-run", "--ranks", "16"]) == 0
    said = capsys.readouterr().out
    assert "recomputation" in said and "GPU-hours" in said and "of 16" in said and "reduce-scatter" in said


def test_a_dry_run_refuses_ranks_that_cannot_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "paper-medium", "--dry-run", "--ranks", "7"]) == 2
    assert "train.batch must be a multiple of the 7 ranks" in capsys.readouterr().err


class Ops(TorchDispatchMode):
    """Adds up the bytes that collectives give out."""

    def __enter__(self) -> Ops:
        self.gathers: list[int] = []
        self.scatters: list[int] = []
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, _types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if op is torch.ops.c10d._allgather_base_.default:
            self.gathers.append(args[0].nbytes)
        if op is torch.ops.c10d._reduce_scatter_base_.default:
            self.scatters.append(args[1].nbytes)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def two_pretended_ranks() -> Iterator[None]:
    """The first of two ranks; the messages of the other are whatever is in memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("encoding", ["rope", "grape-m+grape-ap"])
def test_messages_are_those_that_fsdp_sends(encoding: str, two_pretended_ranks: None) -> None:
    changes = {
        "model.encoding": encoding, "model.width": 32, "model.heads": 2, "model.layers": 3, "train.batch": 8,
        "train.strategy": "fsdp", "train.micro_batch": 2, "train.precision": "bf16",
    }  # fmt: skip
    config = load("demo", changes)
    said = estimate(config, 64, ranks=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Decoder(config.model.decoder(64)), mesh, half=True)
    ids = torch.zeros(1, 8, dtype=torch.long)
    with Ops() as ops:
        for last in (False, True):
            with gradients_exchanged(model, last):
                model(ids, targets=ids).backward()
    assert said.micro_batches == 2
    assert len(ops.gathers) + len(ops.scatters) == said.messages.collectives
    padding = 1.02  # of parameters that two ranks cannot share evenly
    assert 1 <= sum(ops.gathers) / 2 / said.messages.all_gather < padding
    assert 1 <= sum(ops.scatters) / 2 / said.messages.reduce_scatter < padding
