"""The cache folder of this user: compiled libraries, verdicts on GPU kernels, tuned tiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """$GRAPE_PE_CACHE, or grape_pe under the user's cache directory."""
    chosen = os.environ.get("GRAPE_PE_CACHE")
    if chosen:  # absolute: a loader searches its own folders for a name without a folder
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grape_pe"


def safe_folder() -> Path:
    """The cache folder, made if need be. An OSError unless only this user may write to it."""
    try:
        path = cache_directory()
    except RuntimeError as problem:  # there is no home directory
        raise OSError(str(problem)) from problem
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_what_others_can_write(path)
    return path


def refuse_what_others_can_write(path: Path) -> None:
    """Loading a library runs its code, so nobody else may be able to change it."""
    status = path.stat()
    if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise PermissionError(
            f"{path} must belong to the user who runs this (uid {os.geteuid()}, not {status.st_uid}) "
            f"and be writable by nobody else (not mode {status.st_mode & 0o777:o}); change its owner or mode"
        )


@contextmanager
def lock(path: Path, seconds: float = -1) -> Iterator[None]:
    """One process at a time, where the file system has locks. TimeoutError after `seconds`; -1 waits for ever."""
    from filelock import FileLock

    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path, timeout=seconds))
        except TimeoutError:
            raise
        except (OSError, NotImplementedError):
            pass
        yield
