"""The shard format: 256 int32 of header (magic, version, number of tokens), then uint16 or uint32 tokens.

With 16 bits it is the format in which FineWeb-Edu is published pre-tokenised, with 32 bits llm.c's for the
vocabulary of Llama 3. Numbers are little-endian.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import LabError
from ..files import replacing, sha256_of, writing

#: magic number and version, by the bytes of a token
FORMATS = {2: (20240520, 1), 4: (20240801, 7)}
HEADER_BYTES = 256 * 4
#: suffix of a shard that is still being written
PART = ".part"

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def token_bytes(vocab_size: int) -> int:
    """Bytes per token: 2 if the vocabulary fits, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest."""

    file: str
    split: str
    tokens: int
    documents: int
    sha256: str


def header(tokens: int, width: int) -> bytes:
    """The header of a shard of `tokens` tokens of `width` bytes."""
    numbers = np.zeros(256, dtype="<i4")
    numbers[:3] = *FORMATS[width], tokens
    return numbers.tobytes()


def write_shard(path: str | os.PathLike[str], tokens: Tokens) -> None:
    """Write one shard atomically."""
    width = tokens.dtype.itemsize
    with replacing(Path(path)) as scratch, open(scratch, "wb") as file:
        file.write(header(len(tokens), width) + np.ascontiguousarray(tokens, f"<u{width}").tobytes())
        _flush(file)


def check_shard(path: Path) -> tuple[int, int]:
    """Number of tokens and bytes per token, from the header; checks magic, version and length."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as error:
        raise LabError(f"cannot read shard {path}: {error.strerror or error}; copy it again") from error
    if len(start) < HEADER_BYTES:
        raise LabError(
            f"shard {path} is truncated: its header takes {HEADER_BYTES} bytes, the file has {size}; copy it again"
        )
    magic, version, tokens = (int(number) for number in np.frombuffer(start, dtype="<i4")[:3])
    versions = dict(FORMATS.values())
    if magic not in versions:
        raise LabError(
            f"{path} is not a token shard: its magic number must be {' or '.join(map(str, versions))}, got {magic}"
        )
    if version != versions[magic]:
        raise LabError(f"shard {path} has version {version}; this library reads version {versions[magic]}")
    width = next(width for width, each in FORMATS.items() if each[0] == magic)
    expected = HEADER_BYTES + width * tokens
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise LabError(
            f"shard {path} {fault}: expected {expected} bytes for {tokens} tokens, got {size}; "
            "copy or prepare it again"
        )
    return tokens, width


def read_shard(path: str | os.PathLike[str]) -> Tokens:
    """The tokens of a shard, memory-mapped."""
    path = Path(path)
    tokens, width = check_shard(path)
    if tokens == 0:
        return np.zeros(0, dtype=f"<u{width}")
    mapped = np.memmap(path, dtype=f"<u{width}", mode="r", offset=HEADER_BYTES, shape=(tokens,))
    return mapped.view(np.ndarray)  # still mapped, but slices of a plain array cost a tenth


class SplitWriter:
    """Writes one split's stream of tokens as shards of exactly `shard_tokens`; the last may be shorter.

    The open shard is `NAME.bin.part`. A new writer with an earlier `state` drops what was written after it.
    """

    def __init__(
        self, directory: Path, split: str, shard_tokens: int, state: dict[str, Any] | None = None, width: int = 2
    ):  # fmt: skip
        self.width = width  # bytes per token
        self.directory, self.split, self.shard_tokens = directory, split, shard_tokens
        state = state or {}
        self.finished = [Shard(**entry) for entry in state.get("finished", [])]
        self.tokens: int = state.get("tokens", 0)
        self.documents: int = state.get("documents", 0)
        self.total_tokens = self.tokens + sum(shard.tokens for shard in self.finished)
        self._drop_later_files()
        with writing(self._part):
            self._file = self._reopen()

    @property
    def _path(self) -> Path:
        return self.directory / f"{self.split}_{len(self.finished):06d}.bin"

    @property
    def _part(self) -> Path:
        return self._path.with_name(self._path.name + PART)

    def _drop_later_files(self) -> None:
        """Remove shards begun after the state was saved; the open one may already have its final name."""
        kept = {shard.file for shard in self.finished}
        if self._path.exists():
            os.replace(self._path, self._part)
        for path in self.directory.glob(f"{self.split}_*.bin*"):
            if path.name not in kept and path != self._part:
                path.unlink()

    def _reopen(self) -> BinaryIO:
        length = HEADER_BYTES + self.width * self.tokens
        if self.tokens and (not self._part.exists() or self._part.stat().st_size < length):
            raise LabError(
                f"{self._part} is shorter than the progress file says; delete {self.directory} and start again"
            )
        file = open(self._part, "r+b" if self._part.exists() else "w+b")  # noqa: SIM115 - kept open
        file.truncate(length)  # a new file becomes an empty header
        file.seek(length)
        return file

    def append(self, document: Tokens, eos: int) -> None:
        """Add a document, which starts with eos and may cross shards."""
        while len(document):
            room = self.shard_tokens - self.tokens
            now, document = document[:room], document[room:]
            with writing(self._part):
                self._file.write(now.astype(f"<u{self.width}", copy=False).tobytes())
            self.tokens += len(now)
            self.total_tokens += len(now)
            self.documents += int(np.count_nonzero(now == eos))
            if self.tokens == self.shard_tokens:
                self._finish_shard()
                with writing(self._part):
                    self._file = self._reopen()

    def _finish_shard(self) -> None:
        with writing(self._path):
            self._file.seek(0)
            self._file.write(header(self.tokens, self.width))
            _flush(self._file)
            self._file.close()
            digest = sha256_of(self._part)
            os.replace(self._part, self._path)
        self.finished.append(Shard(self._path.name, self.split, self.tokens, self.documents, digest))
        self.tokens = self.documents = 0

    def state(self) -> dict[str, Any]:
        """Position of the stream, after flushing it to the disk."""
        with writing(self._part):
            _flush(self._file)
        finished = [asdict(shard) for shard in self.finished]
        return {"finished": finished, "tokens": self.tokens, "documents": self.documents}

    def finish(self) -> list[Shard]:
        """Close the last shard and remove it if it is empty."""
        if self.tokens:
            self._finish_shard()
        else:
            self.abandon()
            self._part.unlink(missing_ok=True)
        return self.finished

    def abandon(self) -> None:
        """Close the file; a new writer with the saved state continues it."""
        with suppress(OSError):  # a full disk may refuse the last bytes, which the state does not count
            self._file.close()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
