"""Reading and writing files. A write is atomic; a damaged file is one error that names it and what to do."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..extras import require
from .errors import LabError

LOCK = ".lock"
#: begins the name of a file or directory that is not whole yet
SCRATCH = ".part-"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses (full disk, read-only directory) into one clear line."""
    try:
        yield
    except OSError as error:
        raise LabError(
            f"cannot write {path}: {error.strerror or error}; free disk space or choose another path, then "
            "run the same command again; finished work is kept"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, after the text has reached the disk."""
    scratch = path.with_name(f"{SCRATCH}{path.name}")
    with writing(path):
        try:
            with open(scratch, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def claim(directory: Path, wait: bool = False) -> Any:
    """Lock a directory until `release()` of the result, or until the process ends, however it ends."""
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
    """One process at a time; the others wait, or are refused."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = claim(directory, wait)
    try:
        yield
    finally:
        lock.release()


def contents(directory: Path) -> set[str]:
    """The names in a directory but for its lock and what a killed process left half written."""
    if not directory.is_dir():
        return set()
    return {name for name in os.listdir(directory) if name != LOCK and not name.startswith(SCRATCH)}


def damaged(path: Path, why: object, remedy: str) -> LabError:
    """The error for a file whose content cannot be used."""
    return LabError(f"{path} is damaged: {' '.join(str(why).split())}; {remedy}")


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
    """The JSON objects of a file, one in each line; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = read_text(path, remedy).split("\n")
    cut_short = lines.pop()
    if _parses(cut_short):
        lines.append(cut_short)
    return [
        _object(Path(f"{path}, line {number}"), line, remedy)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
