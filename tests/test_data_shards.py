"""Shards: what is written is read, what is damaged is named, and a stream goes on where it was."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from grape_pe.lab.data import Manifest, Shard, open_dataset, read_shard, verify, write_shard
from grape_pe.lab.data.shards import HEADER_BYTES, SplitWriter
from grape_pe.lab.errors import LabError
from grape_pe.lab.files import sha256_of

EOS = 7
tokens_of_a_shard = st.lists(st.integers(0, 65535), max_size=50)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.mark.parametrize("width, magic, version", [(2, 20240520, 1), (4, 20240801, 7)])
@given(tokens=tokens_of_a_shard)
def test_round_trip(tokens: list[int], width: int, magic: int, version: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.bin")
        write_shard(path, np.array(tokens, dtype=f"u{width}"))
        assert read_shard(path).tolist() == tokens
        assert path.stat().st_size == HEADER_BYTES + width * len(tokens)
        assert np.fromfile(path, dtype="<i4", count=3).tolist() == [magic, version, len(tokens)]


documents = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 15), st.data())
def test_a_stream_continued_is_the_stream(texts: list[list[int]], size: int, data: st.DataObject) -> None:
    arrays = [np.array([EOS, *text], dtype=np.uint16) for text in texts]
    saved = data.draw(st.integers(0, len(arrays)))
    lost = data.draw(st.integers(saved, len(arrays)))
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
        expected = _written(SplitWriter(Path(whole), "train", size), arrays)
        first = SplitWriter(Path(broken), "train", size)
        for array in arrays[:saved]:
            first.append(array, EOS)
        state = first.state()
        for array in arrays[saved:lost]:
            first.append(array, EOS)
        first.abandon()
        found = _written(SplitWriter(Path(broken), "train", size, state), arrays[saved:])
        assert found == expected
        assert _bytes_of(Path(broken)) == _bytes_of(Path(whole))
        stream = np.concatenate([read_shard(Path(whole, shard.file)) for shard in expected])
        assert stream.tolist() == np.concatenate(arrays).tolist()
        assert all(shard.tokens == size for shard in expected[:-1])
        assert sum(shard.documents for shard in expected) == np.count_nonzero(stream == EOS)


def _written(writer: SplitWriter, arrays: list[np.ndarray]) -> list[Shard]:
    for array in arrays:
        writer.append(array, EOS)
    return writer.finish()


def _bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two shards of 100 tokens below 50."""
    shards = []
    for split in ("train", "val"):
        path = tmp_path / f"{split}_000000.bin"
        write_shard(path, np.arange(100, dtype=np.uint16) % 50)
        shards.append(Shard(path.name, split, 100, 2, sha256_of(path)))
    Manifest("bytes", 50, 0, {}, tuple(shards)).save(tmp_path)
    return tmp_path


def _edit(path: Path, place: int, new: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:place] + new + old[place + len(new) :])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _shrink(path: Path) -> None:
    write_shard(path, np.zeros(3, dtype=np.uint16))


@pytest.mark.parametrize(
    "damage, message",
    [
        (_truncate, "is truncated: expected 1224 bytes for 100 tokens, got 1204"),
        (lambda path: path.write_bytes(b"short"), "its header takes 1024 bytes, the file has 5"),
        (lambda path: path.write_bytes(path.read_bytes() + b"xy"), "is too long: expected 1224 bytes"),
        (lambda path: _edit(path, 0, b"\0\0\0\0"), "magic number must be 20240520 or 20240801, got 0"),
        (lambda path: _edit(path, 4, b"\2"), "has version 2; this library reads version 1"),
        (_shrink, "holds 3 tokens, the manifest says 100"),
        (Path.unlink, "No such file"),
    ],
)
def test_damage_is_seen_on_opening(dataset: Path, damage, message: str) -> None:
    assert open_dataset(dataset).tokens("train") == 100
    damage(dataset / "train_000000.bin")
    with pytest.raises(LabError, match=r"train_000000\.bin") as problem:
        open_dataset(dataset)
    assert message in str(problem.value)
    assert message in str(dict(_verified(dataset))["train_000000.bin"])


def test_verify_sees_a_changed_token_and_one_beyond_the_vocabulary(dataset: Path) -> None:
    assert [problem for _, problem in _verified(dataset)] == [None, None]
    _edit(dataset / "train_000000.bin", HEADER_BYTES + 8, b"\x09")
    _edit(dataset / "val_000000.bin", HEADER_BYTES + 2 * 60, b"\x32")
    changed, beyond = (problem or "" for _, problem in _verified(dataset))
    assert "sha256" in changed and "has changed" in changed
    assert "has token 50 at position 60, beyond the vocabulary of 50" in beyond
    opened = open_dataset(dataset)
    with pytest.raises(LabError, match="token 50 at position 60"):
        opened.read(opened.manifest.of("val")[0], 55, 10)


def _verified(directory: Path) -> list[tuple[str, str | None]]:
    return [(shard.file, problem) for shard, problem in verify(directory)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is damaged: it is not JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"format": "x"}', "must be a 'grape-pe dataset' of version 1, got 'x' of version None"),
        ('{"format": "grape-pe dataset", "version": 1}', "is damaged: it has no tokenizer"),
    ],
)
def test_damaged_manifest(dataset: Path, text: str, message: str) -> None:
    (dataset / "manifest.json").write_text(text)
    with pytest.raises(LabError, match=r"manifest\.json") as problem:
        open_dataset(dataset)
    assert message in str(problem.value)


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no dataset at"):
        open_dataset(tmp_path / "none")
    with pytest.raises(LabError, match="grape data adopt"):
        open_dataset(tmp_path)
    (tmp_path / "progress.json").write_text("{}")
    with pytest.raises(LabError, match="is not finished"):
        open_dataset(tmp_path)
