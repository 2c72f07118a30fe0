"""Making a dataset: documents to tokens to shards, resumable after a kill at any moment.

Each split is one stream of tokens, cut into shards. `progress.json` says how far source and streams are; it
is replaced at once, between two chunks of documents. What was written after it is dropped when continuing,
so the files come out the same, byte for byte, however often and wherever the preparation was interrupted.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import SCRATCH, contents, damaged, locked, read_json, write_json
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

Writers = dict[str, SplitWriter]
HeldOut = Callable[[int], bool]


@dataclass
class _State:
    """How far a preparation is: the next document, where the source stands, the state of each stream."""

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
    """Prepare a dataset in `out`, or go on with it, or find it done. Returns the directory.

    Args:
        source: where the text comes from.
        out: the dataset's directory.
        tokenizer: gpt2, bytes, bpe-N (trained on the data), a tokenizer.json or a directory with one.
        shard_tokens: tokens in a shard.
        validation: the share held out: the first document (cut where it is longer than the share of the
            text) and others chosen by a hash of their number.
        max_tokens: stop after the document in which this number is reached.
        workers: processes that tokenize; the files do not depend on it.
        show_progress: print a progress line.
        wait: if another process prepares this directory, wait for it instead of refusing.
    """
    settings = {**source.settings(), "tokenizer": tokenizer_setting(tokenizer), "shard_tokens": shard_tokens}
    settings |= {"validation": validation, "split_rule": SPLIT_RULE, "max_tokens": max_tokens}
    _check(settings, workers)
    directory = Path(out).expanduser()
    if _finished(directory, settings) and not (directory / PROGRESS).exists():
        return directory
    _check_directory(directory)
    _check_source(source, validation)  # before anything is written
    with locked(directory, wait), _nothing_half_made(directory, keep=wait or _begun(directory)):
        if not _finished(directory, settings):
            progress = _begin(directory, settings)
            held_out = source.hold_out(validation)
            if not (directory / FOLDER).is_dir():
                texts = (text for chunk in source.chunks() for text in chunk.texts)
                build_tokenizer(tokenizer, texts).save(directory)
            with closing(ProgressLine(directory.name, 0, 100, quiet=not show_progress)) as line:
                _run(source, directory, progress, held_out, workers, line)
        (directory / PROGRESS).unlink(missing_ok=True)
    return directory


def _begun(directory: Path) -> bool:
    return (directory / PROGRESS).exists() or (directory / MANIFEST).exists()


@contextmanager
def _nothing_half_made(directory: Path, keep: bool) -> Iterator[None]:
    """After an error, remove a directory in which no documents are kept yet; with some, one can go on."""
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
    """The built-in corpus, prepared once in the cache ($GRAPE_DATA, or ~/.cache/grape-pe/data).

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
        raise LabError(f"a shard counts its tokens in 31 bits, got {settings['shard_tokens']}")
    if not 0 < settings["validation"] < 1:
        raise LabError(
            f"--validation must be a share between 0 and 1, such as 0.005, got {settings['validation']}"
        )


def _check_source(source: Source, share: float) -> None:
    """Refuse a source without text, or with too little of it for the share held out."""
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
    """The first document, which is held out, ends where `most` bytes are reached; the rest of it follows."""
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


def _check_directory(directory: Path) -> None:
    """Refuse a directory with anything in it that is not ours."""
    if directory.exists() and not directory.is_dir():
        raise LabError(f"--out must be a directory, but {directory} is a file")
    if not directory.is_dir() or (directory / PROGRESS).exists() or (directory / MANIFEST).exists():
        return
    if others := contents(directory):
        raise LabError(
            f"{directory} holds {min(others)} and is not a dataset; choose an empty or new directory with --out"
        )


def _begin(directory: Path, settings: dict[str, Any]) -> _State:
    """The progress to go on from; where nothing is done yet, the settings may still change."""
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
    try:
        found = _State(**read_json(path, remedy))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise damaged(path, error, remedy) from None
    if not isinstance(found.settings, dict) or not isinstance(found.documents, int):
        raise damaged(path, "settings must be an object and documents a number", remedy)
    if not isinstance(found.streams, dict | None):
        raise damaged(path, "streams must be an object", remedy)
    return found


def _check_same(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)
        raise LabError(
            f"{directory} was prepared with other settings ({changes}); use those, or choose another --out"
        )


def _run(
    source: Source, directory: Path, progress: _State, held_out: HeldOut, workers: int, line: ProgressLine
) -> None:
    """Tokenize what is left of the source, then write the manifest."""
    tokenizer = load_tokenizer(directory)
    with _writers(directory, progress, token_bytes(tokenizer.vocab_size)) as writers:
        texts, size = source.chunks(progress.cursor), source.size()
        if size is not None and not progress.documents:
            texts = _first_cut(texts, progress.settings["validation"] * size)
        with closing(encoded(texts, directory, workers)) as chunks:
            _write_all(chunks, writers, progress, directory, held_out, tokenizer.eos, line)
        line.tell(100, _counts(writers, progress), last=True)
        shards = [shard for split in SPLITS for shard in writers[split].finish()]
    if {shard.split for shard in shards} != set(SPLITS):
        raise LabError("nothing is left to train on after the validation text; give more text")
    name = progress.settings["tokenizer"]
    Manifest(name, tokenizer.vocab_size, tokenizer.eos, progress.settings, tuple(shards)).save(directory)


@contextmanager
def _writers(directory: Path, progress: _State, width: int) -> Iterator[Writers]:
    size, streams = progress.settings["shard_tokens"], progress.streams or {}
    writers = {split: SplitWriter(directory, split, size, streams.get(split), width) for split in SPLITS}
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.abandon()


def _write_all(
    chunks: Iterable[EncodedChunk],
    writers: Writers,
    progress: _State,
    directory: Path,
    held_out: HeldOut,
    eos: int,
    line: ProgressLine,
) -> None:
    committed = _total(writers)
    for chunk in chunks:
        more = _write(chunk, writers, progress, held_out, eos)
        line.tell(round(100 * (chunk.fraction or 0)), _counts(writers, progress))
        if not more:
            return
        if _total(writers) - committed >= COMMIT_TOKENS:
            committed = _total(writers)
            progress.cursor = chunk.cursor
            progress.streams = {split: writer.state() for split, writer in writers.items()}
            progress.save(directory)


def _write(chunk: EncodedChunk, writers: Writers, progress: _State, held_out: HeldOut, eos: int) -> bool:
    """Add a chunk's documents to their streams; False once there are enough tokens."""
    most = progress.settings["max_tokens"]
    for document in chunk.documents():
        split = "val" if held_out(progress.documents) else "train"
        writers[split].append(document, eos)
        progress.documents += 1
        if most is not None and _total(writers) >= most:
            return False
    return True


def _counts(writers: Writers, progress: _State) -> str:
    return f"{progress.documents:,} documents, {_total(writers):,} tokens"


def _total(writers: Writers) -> int:
    return sum(writer.total_tokens for writer in writers.values())
