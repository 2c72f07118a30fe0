"""Writing files so that a reader sees the whole of one or none of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import LabError

PART = ".part"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses (full disk, read-only directory) into one clear line."""
    try:
        yield
    except OSError as error:
        raise LabError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another directory, then "
            "run the same command again: what is finished is kept"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` at once, after it has safely reached the disk."""
    scratch = path.with_name(path.name + PART)
    with writing(path):
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LabError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
