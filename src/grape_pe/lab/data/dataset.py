"""A prepared dataset with memory-mapped shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import LabError
from ..files import sha256_of
from .manifest import Manifest, load_manifest
from .shards import Shard, Tokens, check_shard, read_shard
from .tokenizer import load_tokenizer

OPEN_SHARDS = 256  # maps, each with a file descriptor; 100B tokens are a thousand shards
VERIFY_TOKENS = 1 << 24


class Dataset:
    """Shards, tokenizer facts and counts of one directory; make it with `open_dataset`."""

    def __init__(self, directory: Path, manifest: Manifest):
        self.directory, self.manifest = directory, manifest
        self.vocab_size, self.eos = manifest.vocab_size, manifest.eos
        self._map = lru_cache(maxsize=OPEN_SHARDS)(lambda name: read_shard(directory / name))

    def __repr__(self) -> str:
        counts = ", ".join(f"{split} {self.tokens(split):,} tokens" for split in ("train", "val"))
        return f"Dataset({str(self.directory)!r}: {self.manifest.tokenizer}, {counts})"

    def tokens(self, split: str) -> int:
        return self.manifest.tokens(split)

    def read(self, shard: Shard, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of a shard, checked against the vocabulary."""
        found = self._map(shard.file)[start : start + count]
        if found.max(initial=0) >= self.vocab_size:
            check_vocabulary(found, self.vocab_size, self.directory / shard.file, start)
        return found.astype(np.int64)


def check_vocabulary(tokens: Tokens, vocab_size: int, path: Path, start: int = 0) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        where = int(np.argmax(tokens >= vocab_size))
        raise LabError(
            f"shard {path} has token {int(tokens[where])} at position {start + where}, beyond the vocabulary "
            f"of {vocab_size}; it is damaged or was made with another tokenizer"
        )


def open_dataset(directory: str | os.PathLike[str]) -> Dataset:
    """Open a prepared dataset. Checks headers and lengths of all shards; `verify` also checks hashes.

    Args:
        directory: the dataset.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    for shard in manifest.shards:
        check_counts(directory, shard)
    return Dataset(directory, manifest)


def first_words(directory: str | os.PathLike[str], count: int) -> tuple[torch.Tensor, list[str]]:
    """The first tokens of the validation text, (T,), and how each is written."""
    dataset, words = open_dataset(directory), load_tokenizer(directory)
    shard = dataset.manifest.of("val")[0]
    tokens = torch.from_numpy(dataset.read(shard, 0, min(count, shard.tokens)))
    return tokens, [words.decode([token]) for token in tokens.tolist()]


def check_counts(directory: Path, shard: Shard) -> None:
    found, _ = check_shard(directory / shard.file)
    if found != shard.tokens:
        raise LabError(
            f"shard {directory / shard.file} holds {found} tokens, the manifest says {shard.tokens}; "
            "it was replaced: prepare the dataset again"
        )


def verify(directory: str | os.PathLike[str]) -> Iterator[tuple[Shard, str | None]]:
    """Check length, hash and tokens of each shard; yields it with its problem, or None.

    Args:
        directory: the dataset.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    for shard in manifest.shards:
        try:
            _verify_shard(directory, shard, manifest.vocab_size)
        except LabError as problem:
            yield shard, str(problem)
        else:
            yield shard, None


def _verify_shard(directory: Path, shard: Shard, vocab_size: int) -> None:
    path = directory / shard.file
    check_counts(directory, shard)
    tokens = read_shard(path)
    for start in range(0, len(tokens), VERIFY_TOKENS):
        check_vocabulary(tokens[start : start + VERIFY_TOKENS], vocab_size, path, start)
    digest = sha256_of(path)
    if digest != shard.sha256:
        raise LabError(
            f"shard {path} has changed: its sha256 is {digest[:12]}…, the manifest says {shard.sha256[:12]}…; "
            "copy it again"
        )
