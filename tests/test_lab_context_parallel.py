"""`train.context_parallel`: ranks that share each sequence learn what one process learns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from safetensors.torch import load_file

from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.distributed import check_split
from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.trainer import train
from lab_runs import grape, start, tiny_config, tiny_data, words

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
