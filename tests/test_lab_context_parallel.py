"""`train.context_parallel`: ranks that share each sequence learn what one process learns."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("pydantic")

from safetensors.torch import load_file

from grape_pe.cli import main
from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.distributed import check_split
from grape_pe.lab.train.estimate import estimate
from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.trainer import train
from grape_pe.models import Decoder
from grape_pe.parallel import ContextParallel
from grape_pe.parallel.ring import Ring
from lab_runs import Running, grape, start, tiny_config, tiny_data, words

TOLERANCE = 1e-5
#: an odd validation set, of which the groups of ranks have unequal shares
SIZES = {
    "model__kv_shift": True, "model__layers": 2, "train__steps": 6, "train__eval_sequences": 3, "train__eval_every": 3,
    "train__checkpoint_every": 3,
}  # fmt: skip
TWO = {"train__context_parallel": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("shared"))


def curve(run: Path) -> list[tuple[str, int, float]]:
    return [
        (x["kind"], x["step"], x["loss"]) for x in read_metrics(run) if x["kind"] in ("train", "validation")
    ]


def assert_same(run: Path, other: Path) -> None:
    """Losses, and final weights by their norm: AdamW moves single ones, whose gradients are about 0, by rounding."""
    ours, theirs = curve(run), curve(other)
    assert [line[:2] for line in ours] == [line[:2] for line in theirs]
    assert [line[2] for line in ours] == pytest.approx([line[2] for line in theirs], abs=TOLERANCE)
    ours, theirs = (load_file(each / "final/model.safetensors") for each in (run, other))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() < TOLERANCE * weight.norm(), name


def ranks_learn(data: Path, out: Path, ranks: int, layout: dict[str, object], **changes: object) -> None:
    """As one process does, by the losses and weights of both."""
    train(tiny_config(data, **{**SIZES, **changes}), out / "alone", quiet=True)
    code, said = grape(words(data, out / "shared", **{**SIZES, **changes, **layout}), ranks)
    assert code == 0, said
    assert_same(out / "shared", out / "alone")


def test_two_ranks_share_sequences(data: Path, tmp_path: Path) -> None:
    ranks_learn(data, tmp_path, 2, TWO, model__encoding="fox")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["rope", "alibi", "grape-a-qk", "grape-ap", "grape-m-ctx+fox", "t5"])
def test_two_ranks_share_sequences_with(encoding: str, data: Path, tmp_path: Path) -> None:
    ranks_learn(data, tmp_path, 2, TWO, model__encoding=encoding)


@pytest.mark.slow
@pytest.mark.parametrize("layout, model", [
    ({"train__micro_batch": 1}, {}),
    ({"train__strategy": "fsdp", "train__micro_batch": 1}, {}),
    ({"train__strategy": "fsdp", "train__shard": 2, "train__recompute": True}, {}),
    ({}, {"model__absolute": "learned", "model__shared_encoding": True}),
], ids=str)  # fmt: skip
def test_four_ranks_are_two_groups_of_two(layout: dict, model: dict, data: Path, tmp_path: Path) -> None:
    ranks_learn(data, tmp_path, 4, TWO | layout, model__encoding="rope+fox+grape-ap", **model)


@pytest.mark.slow
def test_killed_it_ends_the_same_and_goes_on_with_other_ranks(data: Path, tmp_path: Path) -> None:
    """One of two ranks dies, then the other, as torchrun does it: to the last bit, or on one process to rounding."""
    sizes = {**SIZES, **TWO, "model__encoding": "fox", "train__steps": 60, "train__checkpoint_every": 10}
    assert grape(words(data, tmp_path / "whole", **sizes), 2)[0] == 0
    for ranks, more in ((2, {}), (1, {"train__context_parallel": 1})):
        run = tmp_path / f"broken-{ranks}"
        running = start(words(data, run, **sizes), 2)
        while running.alive() and not (run / "checkpoints/step-00000020").exists():
            time.sleep(0.001)
        Running(running.processes[1:], []).send(signal.SIGKILL)
        time.sleep(0.2)
        running.send(signal.SIGKILL)
        assert running.wait()[0] != 0 and not (run / "final").exists()
        code, said = grape([*words(data, run, **{**sizes, **more}), "--resume"], ranks)
        assert code == 0, said
        if ranks == 2:
            assert curve(run) == curve(tmp_path / "whole")
            ours, theirs = (each / "final/model.safetensors" for each in (run, tmp_path / "whole"))
            assert ours.read_bytes() == theirs.read_bytes()
        else:
            losses = ([line[2] for line in curve(each)] for each in (run, tmp_path / "whole"))
            assert next(losses) == pytest.approx(next(losses), abs=TOLERANCE)


@pytest.mark.parametrize("changes, ranks, says", [
    ({}, 3, "train.context_parallel must divide the number of ranks, got 2 for 3"),
    ({}, 1, "train.context_parallel must divide the number of ranks, got 2 for 1"),
    ({"train.batch": 3}, 4, "train.batch must be a multiple of the 2 groups of 2 ranks, got 3"),
    ({"train.batch": 6, "train.micro_batch": 2}, 4, "takes 3 sequences, which train.micro_batch must divide"),
    ({"data.sequence": 130}, 2, "data.sequence must be a multiple of 4 and at least 8 .*, got 130"),
    ({"train.context_parallel": 4, "data.sequence": 8}, 4, "a multiple of 8 and at least 16 .*, got 8"),
    ({"data.source": "task:copy"}, 2, "needs text, got data.source task:copy"),
    ({"data.documents": True}, 2, "without data.documents"),
    ({"model.window": [None, 8], "model.layers": 2}, 2, "without model.window"),
    ({"model.encoding": "fire"}, 2, "cannot split a TileBias"),
    ({"model.encoding": "dape"}, 2, "cannot split a ProductBias"),
    ({"model.encoding": ["rope", "path"], "model.layers": 2}, 2, "train.context_parallel: .* cannot split a PaTHBias"),
    ({"model.encoding": "xpos"}, 2, "cannot continue the state of XPos"),
])  # fmt: skip
def test_what_ranks_cannot_share_is_refused(changes: dict, ranks: int, says: str) -> None:
    with pytest.raises(LabError, match=says):
        check_split(load("demo", {"train.context_parallel": 2, **changes}), ranks)


def test_a_refusal_writes_nothing(data: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="must divide the number of ranks"):
        train(tiny_config(data, **TWO), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def two_pretended_ranks() -> Iterator[None]:
    """The first of two ranks; the messages of the other are whatever is in memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("encoding", ["rope", "alibi+grape-m", "fox", "grape-a-qk", "rope+grape-ap"])
def test_messages_are_those_that_the_ring_sends(
    encoding: str, recompute: bool, two_pretended_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("demo", {
        "model.encoding": encoding, "model.width": 64, "model.heads": 4, "model.kv_heads": 2, "model.layers": 3,
        "train.batch": 3, "train.context_parallel": 2, "train.micro_batch": 1, "data.sequence": 64,
        "train.recompute": recompute,
    })  # fmt: skip
    said, sent, exchange = estimate(config, 64, ranks=2), [], Ring._exchange

    def counted(self: Ring, tensors: Sequence[torch.Tensor]) -> Any:
        sent.append(sum(x.numel() * x.element_size() for x in tensors))
        return exchange(self, tensors)

    monkeypatch.setattr(Ring, "_exchange", counted)
    model, tokens = Decoder(config.decoder(64)), torch.zeros(1, 32, dtype=torch.long)
    model.gradient_checkpointing = recompute
    model(tokens, targets=tokens, parallel=ContextParallel()).backward()
    assert said.micro_batches == 3
    assert 3 * len(sent) == said.messages.exchanges and 3 * sum(sent) == said.messages.ring


def test_several_devices_hold_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"train.recompute": True, "train.micro_batch": 1, "train.batch": 8}
    alone = estimate(load("paper-medium", given), 50304, 8)
    shared = estimate(load("paper-medium", given | {"train.context_parallel": 8}), 50304, 8)
    assert (
        shared.memory.activations == alone.memory.activations / 8 and 5 < shared.longest / alone.longest < 8
    )
    assert shared.memory.weights == alone.memory.weights and shared.messages.all_gather > 0
    words = ["train", "paper-medium", "--train.context_parallel", "8", "--dry-run", "--ranks", "16"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        "8 share a sequence" in said and "80 GB can hold a sequence of" in said and "exchanges a step" in said
    )
