"""Where documents come from: the running Python, files, or a Hugging Face dataset.

A source yields documents in a fixed order and continues from a cursor, a small JSON value.
"""

from __future__ import annotations

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...extras import require
from ..errors import LabError
from .corpus import builtin_documents, corpus_name
from .readers import READERS, read_text, text_of
from .splitting import held_out, without_repeats
from .tokenizer import DEFAULT_TOKENIZER

CHUNK_CHARACTERS = 1 << 20

FINEWEB = "HuggingFaceFW/fineweb-edu"
NAMED = {
    "fineweb-edu-10B": (FINEWEB, "sample-10BT"),
    "fineweb-edu-100B": (FINEWEB, "sample-100BT"),
    "openwebtext": ("Skylion007/openwebtext", None),
}
#: (i, n): machine i of n, from 0, takes every n-th file
Part = tuple[int, int]
WHOLE: Part = (0, 1)


@dataclass(frozen=True)
class Chunk:
    """Some documents, the cursor after them, and the share of the source read so far, if known."""

    texts: list[str]
    cursor: Any
    fraction: float | None


class Source(ABC):
    """Documents in order. `cursor` and `fraction` refer to the latest iteration."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that determine the documents; a preparation continues only if they are unchanged."""

    @abstractmethod
    def documents(self, cursor: Any = None) -> Iterator[str]:
        """All documents, or those after a cursor."""

    @abstractmethod
    def cursor(self) -> Any:
        """Position of the iteration, as JSON."""

    def fraction(self) -> float | None:
        """Share read so far, from 0 to 1, if known."""
        return None

    def size(self) -> int | None:
        """Total bytes of text, if known; approximate where files hold more than text."""
        return None

    def hold_out(self, share: float) -> Callable[[int], bool]:
        """Choose about this share of the documents for validation, before any is read. Returns a test by number."""
        return partial(held_out, share=share)

    def chunks(self, cursor: Any = None) -> Iterator[Chunk]:
        """The non-empty documents, about a million characters at a time."""
        texts, characters = [], 0
        for text in self.documents(cursor):
            if not text.strip():
                continue
            # lone surrogates, which JSON may contain, cannot be encoded
            texts.append(text.encode(errors="replace").decode() if not text.isascii() else text)
            characters += len(text)
            if characters >= CHUNK_CHARACTERS:
                yield Chunk(texts, self.cursor(), self.fraction())
                texts, characters = [], 0
        if texts:
            yield Chunk(texts, self.cursor(), self.fraction())


class BuiltinSource(Source):
    """The text of the running Python and torch; validation text has no repeats of training text."""

    def __init__(self) -> None:
        self._all = builtin_documents()
        self._next = 0

    def settings(self) -> dict[str, Any]:
        return {"source": "builtin", "text": corpus_name()}

    def hold_out(self, share: float) -> Callable[[int], bool]:
        chosen = [held_out(number, share) for number in range(len(self._all))]
        self._all, numbers = without_repeats(self._all, chosen)
        return numbers.__contains__

    def documents(self, cursor: Any = None) -> Iterator[str]:
        for number in range(cursor or 0, len(self._all)):
            self._next = number + 1
            yield self._all[number]

    def cursor(self) -> Any:
        return self._next

    def fraction(self) -> float | None:
        return self._next / len(self._all)


class FileSource(Source):
    """Text, jsonl and parquet files, in order."""

    def __init__(self, paths: Sequence[Path], field: str = "text"):
        self.paths, self.field = list(paths), field
        self._cursor, self._fraction = [0, 0], 0.0

    def settings(self) -> dict[str, Any]:
        sizes = [(path.name, path.stat().st_size) for path in self.paths]
        digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
        counts = f"{len(sizes)} files, {sum(size for _, size in sizes)} bytes"
        return {"source": "files", "files": f"{counts}, names and sizes {digest}", "field": self.field}

    def documents(self, cursor: Any = None) -> Iterator[str]:
        first, item = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            try:
                for after, share, text in READERS.get(path.suffix, read_text)(path, self.field, item):
                    self._cursor, self._fraction = [number, after], (number + share) / len(self.paths)
                    yield text
            except OSError as error:
                raise LabError(f"cannot read {path}: {error.strerror or error}") from error
            item = 0

    def size(self) -> int | None:
        return sum(path.stat().st_size for path in self.paths)

    def cursor(self) -> Any:
        return self._cursor

    def fraction(self) -> float | None:
        return self._fraction


class HubSource(Source):
    """A Hugging Face dataset, streamed: by its name on the Hub, or a local directory `datasets` can load."""

    def __init__(self, name: str, config: str | None, split: str, field: str, part: Part):
        self.name, self.config, self.split, self.field, self.part = name, config, split, field, part
        self._stream: Any = None

    def settings(self) -> dict[str, Any]:
        part = {} if self.part == WHOLE else {"part": f"{self.part[0] + 1}/{self.part[1]}"}
        return {
            "source": f"hf:{self.name}",
            "config": self.config,
            "split": self.split,
            "field": self.field,
            **part,
        }

    def documents(self, cursor: Any = None) -> Iterator[str]:
        load = require("datasets", "lab").load_dataset
        try:
            self._stream = self._mine(load(self.name, self.config, split=self.split, streaming=True))
            if cursor is not None:
                self._stream.load_state_dict(cursor)
            for row in self._stream:
                yield text_of(row, self.field, f"dataset {self.name}")
        except (LabError, ImportError, GeneratorExit):
            raise
        except Exception as error:  # no network, no such dataset, config or split, a broken file
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise LabError(
                f"cannot read dataset {self.name!r} (config {self.config}, split {self.split}): {lines[0]}; "
                "check the names and the network and run the same command again, or give local files"
            ) from error

    def _mine(self, stream: Any) -> Any:
        number, parts = self.part
        if parts > stream.num_shards:
            raise LabError(
                f"--part I/N needs at least N files, got {parts} parts of the {stream.num_shards} files of dataset "
                f"{self.name}; give a smaller N"
            )
        return stream.shard(parts, number, contiguous=False) if parts > 1 else stream

    def cursor(self) -> Any:
        return self._stream.state_dict()


def open_source(
    names: str | Sequence[str],
    *,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    part: Part = WHOLE,
) -> Source:
    """The source with these names: builtin, fineweb-edu-10B, hf:NAME, or files, directories and globs.

    Args:
        part: (i, n) for machine i of n, from 0; not for builtin.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise LabError("no source given; try builtin, a file, or hf:NAME")
    if len(names) == 1:
        if names[0] == "builtin":
            if part != WHOLE:
                raise LabError("--part does not apply to builtin; leave it out")
            return BuiltinSource()
        if names[0] in NAMED:
            name, sample = NAMED[names[0]]
            return HubSource(name, sample, split, field, part)
        if names[0].startswith("hf:"):
            return HubSource(names[0].removeprefix("hf:"), config, split, field, part)
    files = [path for name in names for path in _files(name)]
    if part[1] > len(files):
        raise LabError(
            f"--part I/N needs at least N files, got {part[1]} parts of {len(files)} files; give a smaller N"
        )
    return FileSource(files[part[0] :: part[1]], field)


def default_tokenizer(names: Sequence[str]) -> str:
    """The default tokenizer: GPT-2's for datasets of the Hub, which need a network anyway."""
    return "gpt2" if len(names) == 1 and names[0] in NAMED else DEFAULT_TOKENIZER


def _files(name: str) -> list[Path]:
    """The files of a path, directory or glob, by name."""
    path = Path(name).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in READERS and p.is_file())
        if not found and any(path.glob("*.bin")):
            raise LabError(f"{name} holds .bin shards already; use: grape data adopt {name} --tokenizer gpt2")
    else:
        found = sorted(Path(p) for p in glob.glob(os.fspath(path), recursive=True) if Path(p).is_file())
    if not found:
        raise LabError(
            f"no source {name!r}: it is neither builtin, {', '.join(NAMED)}, hf:NAME, nor a file, a glob "
            f"or a directory with files in {' '.join(READERS)}"
        )
    return found
