"""Preparing a dataset: documents to tokens to shards, resumable after an interruption at any moment.

Each split is one stream of tokens, cut into shards. `progress.json` has the position in the source and in each
stream; it is replaced atomically between two chunks of documents. Continuing drops what was written after it,
so the files are the same, byte for byte, however often the preparation was interrupted.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import SCRATCH, check_output, locked, read_json, typed, write_json
from ..progress import ProgressLine
from .corpus import corpus_name
from .encoding import EncodedChunk, encoded
from .manifest import MANIFEST, PROGRESS, SPLITS, Manifest, load_manifest
from .shards import SplitWriter, token_bytes
from .sources import BuiltinSource, Chunk, Source
from .tokenizer import DEFAULT_TOKENIZER, FOLDER, build_tokenizer, load_tokenizer, tokenizer_setting

SHARD_TOKENS = 100_000_000
VALIDATION = 0.005
BUILTIN_VALIDATION = 0.04
COMMIT_TOKENS = 1 << 23
#: bytes of validation text below which a dataset is refused
LEAST_HELD_OUT = 128
#: which documents are held out; a dataset made by another rule is not continued
SPLIT_RULE = 3


@dataclass
class _State:
    """Progress of a preparation: documents done, position in the source, state of each stream."""

    settings: dict[str, Any]
    documents: int = 0
    cursor: Any = None
    streams: dict[str, dict[str, Any]] | None = None

    def save(self, directory: Path) -> None:
        write_json(directory / PROGRESS, vars(self))


def prepare(
    source: Source,
    out: str | os.PathLike[str],
    *,
    tokenizer: str = DEFAULT_TOKENIZER,
    shard_tokens: int = SHARD_TOKENS,
    validation: float = VALIDATION,
    max_tokens: int | None = None,
    workers: int = 1,
    show_progress: bool = False,
    wait: bool = False,
) -> Path:
    """Prepare a dataset in `out`, or continue it if it is unfinished. Returns the directory.

    Args:
        source: where the text comes from.
        out: the dataset's directory.
        tokenizer: gpt2, bytes, bpe-N (trained on the data), a tokenizer.json or a directory with one.
        shard_tokens: tokens in a shard.
        validation: the share held out: the first document (cut at this share of the text) and others chosen
            by a hash of their number.
        max_tokens: stop after the document in which this number is reached.
        workers: processes that tokenize; the files do not depend on it.
        show_progress: print a progress line.
        wait: if another process prepares this directory, wait for it instead of raising an error.
    """
    settings = {**source.settings(), "tokenizer": tokenizer_setting(tokenizer), "shard_tokens": shard_tokens}
    settings |= {"validation": validation, "split_rule": SPLIT_RULE, "max_tokens": max_tokens}
    _check(settings, workers)
    directory = Path(out).expanduser()
    if _finished(directory, settings) and not (directory / PROGRESS).exists():
        return directory
    check_output(directory, "dataset", PROGRESS if (directory / PROGRESS).exists() else MANIFEST)
    _check_source(source, validation)  # before anything is written
    with locked(directory, wait), _nothing_half_made(directory, keep=wait or _begun(directory)):
        if not _finished(directory, settings):
            state = _begin(directory, settings)
            held_out = source.hold_out(validation)
            if not (directory / FOLDER).is_dir():
                texts = (text for chunk in source.chunks() for text in chunk.texts)
                build_tokenizer(tokenizer, texts).save(directory)
            with closing(ProgressLine(directory.name, 0, 100, quiet=not show_progress)) as line:
                _Preparation(directory, state, held_out, line).run(source, workers)
        (directory / PROGRESS).unlink(missing_ok=True)
    return directory


def _begun(directory: Path) -> bool:
    return (directory / PROGRESS).exists() or (directory / MANIFEST).exists()


@contextmanager
def _nothing_half_made(directory: Path, keep: bool) -> Iterator[None]:
    """After an error, remove a directory without any finished documents."""
    try:
        yield
    except LabError:
        found = None if keep else _read_state(directory)
        if found is not None and not found.documents:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _finished(directory: Path, settings: dict[str, Any]) -> bool:
    if not (directory / MANIFEST).exists():
        return False
    _check_same(load_manifest(directory).settings, settings, directory)
    return True


def builtin(cache_dir: str | os.PathLike[str] | None = None, tokenizer: str = "bpe-2048") -> Path:
    """The built-in corpus, prepared once.

    Args:
        cache_dir: parent directory of the dataset; $GRAPE_DATA or ~/.cache/grape-pe/data by default.
        tokenizer: as for `prepare`.
    """
    root = cache_dir or os.environ.get("GRAPE_DATA") or Path.home() / ".cache/grape-pe/data"
    named = tokenizer_setting(tokenizer).replace(" (sha256 ", "-").strip(")").replace("/", "-")
    directory = Path(root).expanduser() / f"builtin-v{SPLIT_RULE}-{named}-{corpus_name()}"
    if (directory / MANIFEST).exists():
        return directory
    return prepare(BuiltinSource(), directory, tokenizer=tokenizer, validation=BUILTIN_VALIDATION, wait=True)


def _check(settings: dict[str, Any], workers: int) -> None:
    if settings["shard_tokens"] < 1 or workers < 1 or (settings["max_tokens"] or 1) < 1:
        raise LabError(
            f"--shard-tokens, --max-tokens and --workers must be at least 1, got {settings['shard_tokens']}, "
            f"{settings['max_tokens']} and {workers}"
        )
    if settings["shard_tokens"] >= 1 << 31:
        raise LabError(f"--shard-tokens must be below 2^31, got {settings['shard_tokens']}; try 1e8")
    if not 0 < settings["validation"] < 1:
        raise LabError(f"--validation must be between 0 and 1, got {settings['validation']}; try 0.005")


def _check_source(source: Source, share: float) -> None:
    """Refuse a source without enough text for the share held out."""
    if next(source.chunks(), None) is None:
        raise LabError("the source has no text (every document is empty); give other files, or --field")
    size = source.size()
    if size is not None and share * size < LEAST_HELD_OUT:
        enough = min(0.5, math.ceil(100 * LEAST_HELD_OUT / size) / 100)
        possible = f"--validation {enough}, or " if size >= 2 * LEAST_HELD_OUT else ""
        raise LabError(
            f"--validation {share:g} of {size:,} bytes holds out {share * size:.0f} bytes, fewer than "
            f"{LEAST_HELD_OUT}; give {possible}more text"
        )


def _first_cut(chunks: Iterator[Chunk], most: float) -> Iterator[Chunk]:
    """Cut the first document, which is held out, after `most` bytes."""
    first = next(chunks, None)
    if first is None:
        return
    text = first.texts[0]
    characters = max(1, int(most * len(text) / len(text.encode())))
    if characters < len(text):
        at = text.rfind("\n", characters // 2, characters) + 1 or characters
        first = replace(first, texts=[text[:at], text[at:], *first.texts[1:]])
    yield first
    yield from chunks


def _begin(directory: Path, settings: dict[str, Any]) -> _State:
    """The state to continue from; before the first document the settings may still change."""
    found = _read_state(directory) or _State(settings)
    if found.documents:
        _check_same(found.settings, settings, directory)
    elif found.settings != settings:
        shutil.rmtree(directory / FOLDER, ignore_errors=True)
    if not found.documents:
        found = _State(settings)
        found.save(directory)
    for stale in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)
    return found


def _read_state(directory: Path) -> _State | None:
    path, remedy = directory / PROGRESS, f"delete {directory} to start again"
    return typed(_State, read_json(path, remedy), path, remedy) if path.exists() else None


def _check_same(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)
        raise LabError(
            f"{directory} was prepared with other settings ({changes}); use those, or choose another --out"
        )


class _Preparation:
    """Tokenizes what is left of a source, then writes the manifest."""

    def __init__(
        self, directory: Path, state: _State, held_out: Callable[[int], bool], line: ProgressLine
    ) -> None:
        self.directory, self.state, self.held_out, self.line = directory, state, held_out, line
        self.tokenizer = load_tokenizer(directory)
        size, streams = state.settings["shard_tokens"], state.streams or {}
        width = token_bytes(self.tokenizer.vocab_size)
        self.writers = {
            split: SplitWriter(directory, split, size, streams.get(split), width) for split in SPLITS
        }

    def run(self, source: Source, workers: int) -> None:
        state, tokenizer = self.state, self.tokenizer
        with ExitStack() as files:
            for writer in self.writers.values():
                files.callback(writer.abandon)
            texts, size = source.chunks(state.cursor), source.size()
            if size is not None and not state.documents:
                texts = _first_cut(texts, state.settings["validation"] * size)
            with closing(encoded(texts, self.directory, workers)) as chunks:
                self._write_all(chunks)
            self._show(1, last=True)
            shards = [shard for split in SPLITS for shard in self.writers[split].finish()]
        if {shard.split for shard in shards} != set(SPLITS):
            raise LabError("nothing is left to train on after the validation text; give more text")
        facts = (state.settings["tokenizer"], tokenizer.vocab_size, tokenizer.eos, state.settings)
        Manifest(*facts, tuple(shards)).save(self.directory)

    def _write_all(self, chunks: Iterable[EncodedChunk]) -> None:
        state, committed = self.state, self._tokens()
        for chunk in chunks:
            more = self._write(chunk)
            self._show(chunk.fraction or 0)
            if not more:
                return
            if self._tokens() - committed >= COMMIT_TOKENS:
                committed, state.cursor = self._tokens(), chunk.cursor
                state.streams = {split: writer.state() for split, writer in self.writers.items()}
                state.save(self.directory)

    def _write(self, chunk: EncodedChunk) -> bool:
        """Add a chunk's documents to their streams; False once there are enough tokens."""
        most = self.state.settings["max_tokens"]
        for document in chunk.documents():
            split = "val" if self.held_out(self.state.documents) else "train"
            self.writers[split].append(document, self.tokenizer.eos)
            self.state.documents += 1
            if most is not None and self._tokens() >= most:
                return False
        return True

    def _tokens(self) -> int:
        return sum(writer.total_tokens for writer in self.writers.values())

    def _show(self, fraction: float, last: bool = False) -> None:
        status = f"{self.state.documents:,} documents, {self._tokens():,} tokens"
        self.line.show(round(100 * fraction), status, last)
