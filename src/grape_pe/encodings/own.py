"""Encodings from outside this package: from modules of the user, and from installed packages.

- `import_modules(["mine"])` imports modules that call `register`, as `grape --import mine` does.
- A package offers encodings by entry points in the group `grape_pe.encodings`: name = "package.module:Class".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

GROUP = "grape_pe.encodings"
#: modules imported by name, in order: worker processes import them too
IMPORTED: list[str] = []


class ModuleImportError(ImportError):
    """A module given with --import cannot be imported. The message is one line."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name from Python's path, then from the current folder.

    The current folder comes last, so that a file in it cannot replace an installed library.
    """
    for name in names:
        if name in IMPORTED:
            continue
        _check_module_name(name)
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
        _import(name)
        _check_origin(name)
        IMPORTED.append(name)


def _check_module_name(name: str) -> None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        stem = Path(name).stem
        raise ModuleImportError(
            f"--import takes the name of a module, got {name!r}; run grape in the folder of {stem}.py "
            f"with --import {stem}, or add that folder to PYTHONPATH"
        )


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not (name == problem.name or name.startswith(f"{problem.name}.")):
            raise ModuleImportError(_failed(name, problem)) from problem
        raise ModuleImportError(
            f"--import {name}: there is no module {name!r} on Python's path or in {os.getcwd()}; "
            "run grape in its folder, or add that folder to PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as problem:  # whatever the user's code raises
        raise ModuleImportError(_failed(name, problem)) from problem


def _failed(name: str, problem: BaseException) -> str:
    """A one-line message with the error and the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "importlib" not in f.filename]
    where = "" if len(frames) < 2 else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    message = " ".join(str(problem).split())
    return f"--import {name} failed with {type(problem).__name__}: {message}{where}"


def _check_origin(name: str) -> None:
    """Raise an error if another module of that name hides the one in the current folder."""
    first = name.split(".")[0]
    beside = [Path.cwd() / f"{first}.py", Path.cwd() / first / "__init__.py"]
    found = getattr(sys.modules[first], "__file__", None)
    mine = next((path for path in beside if path.is_file()), None)
    if mine is not None and found is not None and not mine.samefile(found):
        raise ModuleImportError(
            f"--import {name}: another module {first!r} on Python's path, {found}, comes before {mine}; "
            "rename your module"
        )


@cache
def offered() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of installed packages that offer encodings, by name, without importing them."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for each in importlib.metadata.entry_points(group=GROUP):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            warnings.warn(
                f"two packages offer an encoding {each.name!r}: {other.value} is used, {each.value} is not; "
                "uninstall one of them",
                stacklevel=2,
            )
    return found


def load_offered(name: str) -> object:
    """The class that an installed package offers under this name."""
    entry = offered()[name]
    try:
        return entry.load()
    except Exception as problem:
        package = "?" if entry.dist is None else entry.dist.name
        raise ImportError(
            f"the package {package} offers the encoding {name!r} as {entry.value}, which cannot be imported: "
            f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        ) from problem
