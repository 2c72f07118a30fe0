"""Tokenization of chunks of documents, in order, in one or several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LabError
from ..orphans import end_with_parent
from .prefetch import in_order
from .shards import Tokens
from .sources import Chunk
from .tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class EncodedChunk:
    """The concatenated tokens of a chunk's documents, and the ends of all but the last."""

    tokens: Tokens
    cuts: list[int]
    cursor: Any
    fraction: float | None

    def documents(self) -> list[Tokens]:
        return np.split(self.tokens, self.cuts)


def encoded(chunks: Iterable[Chunk], directory: Path, workers: int) -> Generator[EncodedChunk, None, None]:
    """Each chunk encoded, in the same order for any number of workers."""
    if workers == 1:
        tokenizer = load_tokenizer(directory)
        for chunk in chunks:
            yield _encode(tokenizer, chunk)
        return
    # Spawned, not forked: threads of the tokenizers library do not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=_start, initargs=(str(directory),))
    try:
        yield from in_order(pool, _work, chunks, ahead=2 * workers)
    except BrokenProcessPool as error:
        raise LabError(
            "a worker process ended, perhaps out of memory; run the same command with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(tokenizer: TextTokenizer, chunk: Chunk) -> EncodedChunk:
    parts = tokenizer.encode_documents(chunk.texts)
    ends = np.cumsum([len(part) for part in parts])
    return EncodedChunk(np.concatenate(parts), ends[:-1].tolist(), chunk.cursor, chunk.fraction)


_tokenizer: TextTokenizer  # of this worker process


def _start(directory: str) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    end_with_parent()
    _tokenizer = load_tokenizer(directory)


def _work(chunk: Chunk) -> EncodedChunk:
    return _encode(_tokenizer, chunk)
