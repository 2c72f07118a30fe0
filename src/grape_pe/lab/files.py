"""Reading and writing files: atomic writes, locks, and errors that name a damaged file and the remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..extras import require
from .errors import LabError

LOCK = ".lock"
#: prefix of a file or directory that is still being written
SCRATCH = ".part-"
Kind = TypeVar("Kind")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise errors of the file system (full disk, read-only directory) as LabError."""
    try:
        yield
    except OSError as error:
        raise LabError(
            f"cannot write {path}: {error.strerror or error}; free disk space or choose another path, then "
            "run the same command again; finished work is kept"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch path that replaces `path`, a file or a directory, when the block ends without an error. A file is
    replaced atomically; an old directory is removed just before. Parent directories are made."""
    scratch = path.with_name(f"{SCRATCH}{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(scratch)
        try:
            yield scratch
            if path.is_dir():
                _remove(path)
            os.replace(scratch, path)
        finally:
            _remove(scratch)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically, after the text has reached the disk."""
    with replacing(path) as scratch, open(scratch, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def claim(directory: Path, wait: bool = False) -> Any:
    """Lock a directory until `release()` of the result or the end of the process."""
    library = require("filelock", "lab")
    lock = library.FileLock(directory / LOCK, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except library.Timeout:  # an OSError too, so it must not reach `writing`
        raise LabError(
            f"{directory} is being written by another process; wait for it to end, or choose another --out"
        ) from None
    return lock


@contextmanager
def locked(directory: Path, wait: bool = False) -> Iterator[None]:
    """Make and lock a directory; while another process holds the lock, wait or raise LabError."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = claim(directory, wait)
    try:
        yield
    finally:
        lock.release()


def contents(directory: Path) -> set[str]:
    """The names in a directory except its lock and unfinished writes."""
    if not directory.is_dir():
        return set()
    return {name for name in os.listdir(directory) if name != LOCK and not name.startswith(SCRATCH)}


def check_output(directory: Path, kind: str, marker: str, ignored: Collection[str] = ()) -> bool:
    """Whether a directory is a `kind`, which has a file `marker`; refuses a file, or a directory of other files."""
    if directory.exists() and not directory.is_dir():
        raise LabError(f"--out must be a directory, but {directory} is a file; give another --out")
    names = contents(directory) - {*ignored}
    if names and marker not in names:
        raise LabError(
            f"{directory} holds {min(names)} and is not a {kind}; give an empty or new directory as --out"
        )
    return bool(names)


def damaged(path: Path, why: object, remedy: str) -> LabError:
    """The error for a file whose content cannot be used."""
    return LabError(f"{path} is damaged: {' '.join(str(why).split())}; {remedy}")


def typed(kind: type[Kind], values: Any, path: Path, remedy: str, why: str = "") -> Kind:
    """`values` read from `path` as a dataclass or model; values of the wrong type mean a damaged file."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(values)  # type: ignore[arg-type,no-any-return]
    except ValidationError as problem:
        error = problem.errors()[0]
        name = ".".join(map(str, error["loc"]))
        fault = f"{name}: {error['msg']}, got {error['input']!r:.60}"
        fault = f"it has no {name}" if error["type"] == "missing" else fault
        raise damaged(path, why + fault, remedy) from None


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_text(path: Path, remedy: str) -> str:
    """A UTF-8 file; raises FileNotFoundError if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is not UTF-8 text ({error.reason} at byte {error.start})", remedy) from None
    except OSError as error:
        raise damaged(path, error.strerror or error, remedy) from None


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object; raises FileNotFoundError if there is none."""
    return _object(path, read_text(path, remedy), remedy)


def _object(place: Path, text: str, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"it is not JSON ({error})", remedy) from None
    if not isinstance(value, dict):
        raise damaged(place, f"expected a JSON object, got {type(value).__name__}", remedy)
    return value


def read_json_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line; an incomplete last line is ignored."""
    if not path.exists():
        return []
    lines = read_text(path, remedy).split("\n")
    try:
        json.loads(lines[-1])
    except (ValueError, RecursionError):  # cut short, or empty
        lines.pop()
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    return [_object(Path(f"{path}, line {number}"), line, remedy) for number, line in numbered]


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
