"""Batches: a pure function of (seed, step, row); prefetching changes nothing but the time."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from grape_pe.lab.data import Batch, DatasetBatches, Manifest, Shard, open_dataset, prefetch, write_shard
from grape_pe.lab.data.batches import Windows
from grape_pe.lab.data.permutation import permute
from grape_pe.lab.errors import LabError

EOS = 0
SHARDS = {"train": [57, 3, 41], "val": [30]}
T, N = 5, 4


@given(st.integers(1, 700), st.integers(-(2**40), 2**40), st.integers(0, 99))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    found = permute(np.arange(size), size, seed, epoch)
    assert sorted(found.tolist()) == list(range(size))


@given(st.integers(1, 2**45), st.integers(0, 9), st.data())
def test_permutation_of_a_huge_range_needs_no_table(size: int, seed: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20))
    found = permute(asked, size, seed, 0).tolist()
    assert len(set(found)) == len(asked)
    assert all(0 <= place < size for place in found)
    assert found == [int(permute(one, size, seed, 0)[0]) for one in asked]


def test_permutation_mixes() -> None:
    """Of 1000 places: few stay, neighbours part, epochs and seeds differ."""
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert np.count_nonzero(order == np.arange(1000)) < 10
        assert np.count_nonzero(np.abs(np.diff(order)) < 5) < 40
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) < 10


def test_permutation_never_changes() -> None:
    """Runs are continued with later versions of the library: the order is part of what is promised."""
    assert permute(np.arange(8), 1000, 5, 2).tolist() == FROZEN_ORDER


FROZEN_ORDER = [704, 579, 768, 526, 924, 325, 20, 833]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token of the train split is its own number: a row tells where it is from. val has documents."""
    path = tmp_path_factory.mktemp("data")
    shards, next_token = [], 1
    for split, lengths in SHARDS.items():
        for number, length in enumerate(lengths):
            tokens = np.arange(next_token, next_token + length, dtype=np.uint16)
            next_token += length
            if split == "val":
                tokens[[0, 7, 12, 13]] = EOS
            name = f"{split}_{number:06d}.bin"
            write_shard(path / name, tokens)
            shards.append(Shard(name, split, length, 0, ""))
    Manifest("none", next_token, EOS, {}, tuple(shards)).save(path)
    return path


def _batches(directory: Path, seed: int = 0, sequence: int = T, **more: bool) -> DatasetBatches:
    return DatasetBatches(open_dataset(directory), sequence, N, seed, **more)


def test_an_epoch_visits_every_window_once(directory: Path) -> None:
    batches = _batches(directory, seed=3)
    count = Windows(batches.dataset, "train", batches.sequence).count
    assert count == (57 - 1) // T + (41 - 1) // T
    rows = torch.cat([batches.batch(step, range(N)).tokens for step in range(3 * count)])
    firsts = rows[:, 0].reshape(-1, count)  # an epoch a row: N * 3 of them
    windows = [1 + T * n for n in range(11)] + [61 + T * n for n in range(8)]
    for epoch in firsts:
        assert sorted(epoch.tolist()) == windows
    assert len({tuple(epoch.tolist()) for epoch in firsts}) == len(firsts)


def test_targets_follow_tokens(directory: Path) -> None:
    batch = _batches(directory).batch(2, range(N))
    assert batch.tokens.shape == batch.targets.shape == (N, T)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(
        batch.targets, batch.tokens + 1
    )  # also at the last token: a window never crosses a shard
    assert batch.documents is None


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(0, 10**9), st.sampled_from([1, 2, 4]))
def test_ranks_share_the_global_batch(directory: Path, seed: int, step: int, ranks: int) -> None:
    whole = _batches(directory, seed).batch(step, range(N))
    by_blocks = [range(N * rank // ranks, N * (rank + 1) // ranks) for rank in range(ranks)]
    by_turns = [range(rank, N, ranks) for rank in range(ranks)]
    for shares in (by_blocks, by_turns):
        for rows in shares:
            part = _batches(directory, seed).batch(step, rows)
            assert torch.equal(part.tokens, whole.tokens[list(rows)])
            assert torch.equal(part.targets, whole.targets[list(rows)])


def test_seeds_differ(directory: Path) -> None:
    one, other = (_batches(directory, seed).batch(0, range(N)).tokens for seed in (0, 1))
    assert not torch.equal(one, other)


def test_validation_is_every_window_in_an_order_that_is_the_same_for_every_seed(directory: Path) -> None:
    one, other = _batches(directory, 0), _batches(directory, 1)
    assert one.validation_rows == (30 - 1) // T
    rows = range(one.validation_rows)
    assert torch.equal(one.validation(rows).tokens, other.validation(rows).tokens)
    stream = torch.from_numpy(
        np.fromfile(directory / "val_000000.bin", dtype="<u2", offset=1024).astype(np.int64)
    )
    found = one.validation(rows)
    whole = torch.cat([found.tokens, found.targets[:, -1:]], 1)
    windows = stream[: len(rows) * T + 1].unfold(0, T + 1, T)
    assert sorted(whole.tolist()) == sorted(windows.tolist())
    assert not torch.equal(whole, windows)  # any first rows are a sample of the whole split
    assert torch.equal(one.validation(range(2)).tokens, found.tokens[:2])


def test_documents(directory: Path) -> None:
    batch = _batches(directory, sequence=14, documents=True).validation(range(2))
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0] * 7 + [1] * 5 + [2] + [3]
    assert batch.documents[1].tolist() == [0] * 14
    assert batch.tokens[0, [0, 7, 12, 13]].tolist() == [EOS] * 4
    plain = _batches(directory, sequence=14).validation(range(2))
    assert torch.equal(plain.targets, batch.targets)  # the end token too: it is how a document ends


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda b: b.batch(0, range(N + 1)), "a batch has rows 0 to 3, got range"),
        (lambda b: b.batch(0, range(-1, 2)), "a batch has rows 0 to 3, got range"),
        (lambda b: b.batch(-1, range(N)), "step must be 0 or more, got -1"),
        (lambda b: b.validation(range(9)), "the validation split has rows 0 to 4"),
        (lambda b: DatasetBatches(b.dataset, 56, N), "the val split of"),
        (lambda b: DatasetBatches(b.dataset, 60, N), "needs 61 tokens in a shard, the longest has 57"),
        (lambda b: DatasetBatches(b.dataset, 0, N), "must be at least 1, got 0 and 4"),
    ],
)
def test_errors(directory: Path, call, message: str) -> None:
    with pytest.raises(LabError) as problem:
        call(_batches(directory))
    assert message in str(problem.value)


def _two_parts(step: int) -> list[range]:
    return [range(0, 1 + step % 2), range(1 + step % 2, N)]


def test_prefetch_gives_the_same_in_the_same_order(directory: Path) -> None:
    batches = _batches(directory)
    steps = [5, 0, 7, 8]
    found = list(prefetch(batches, steps, _two_parts))
    assert [step for step, _ in found] == steps
    for step, parts in found:
        whole = batches.batch(step, range(N))
        assert [len(part.tokens) for part in parts] == [len(rows) for rows in _two_parts(step)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)


class SlowBatches:
    """Counts what was read, takes its time, and fails at one step."""

    vocab_size, validation_rows = 1, 0

    def __init__(self, seconds: float = 0.0, fail_at: int | None = None):
        self.seconds, self.fail_at, self.read = seconds, fail_at, 0

    def batch(self, step: int, rows: range) -> Batch:
        time.sleep(self.seconds)
        if step == self.fail_at:
            raise LabError("the shard is gone")
        self.read += 1
        return self.validation(rows)

    def validation(self, rows: range) -> Batch:
        return Batch(torch.zeros(len(rows), 1), torch.zeros(len(rows), 1))


def test_prefetch_passes_on_what_went_wrong() -> None:
    stream = prefetch(SlowBatches(fail_at=2), itertools.count(), _two_parts)
    assert [next(stream)[0], next(stream)[0]] == [0, 1]
    with pytest.raises(LabError, match="the shard is gone"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_prefetch_is_bounded_and_closes() -> None:
    source = SlowBatches()
    with closing(prefetch(source, itertools.count(), lambda step: [range(N)], depth=3)) as stream:
        next(stream)
        time.sleep(0.2)
        assert source.read <= 1 + 3 + 1  # consumed, waiting, in the thread's hand
        assert any(thread.name.startswith("grape-prefetch") for thread in threading.enumerate())
    assert not any(thread.name.startswith("grape-prefetch") for thread in threading.enumerate())


def test_prefetch_overlaps_reading_with_work() -> None:
    steps, seconds = 10, 0.03
    start = time.perf_counter()
    for _ in prefetch(SlowBatches(seconds), range(steps), lambda step: [range(N)]):
        time.sleep(seconds)
    assert time.perf_counter() - start < 1.6 * steps * seconds  # one after the other: 2.0
