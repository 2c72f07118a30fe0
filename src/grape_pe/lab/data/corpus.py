"""The built-in corpus: text that every Python carries, so that nothing has to be downloaded.

The language reference as `help()` shows it, the docstrings of modules written in C, and the sources of the
standard library (with their docstrings), in an order that depends on nothing but the Python.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 12_000_000

# Tests, tables of characters, and programs that merely ship with the library.
SKIPPED = frozenset(
    {"__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests", "turtledemo"}
)


def python_documents() -> list[str]:
    """All documents, at most about MAX_CHARACTERS together."""
    found, held = [], 0
    for text in _everything():
        if held >= MAX_CHARACTERS:
            break
        if text.strip():
            found.append(text)
            held += len(text)
    return found


def python_name() -> str:
    """Which Python the corpus is of: another version has other text."""
    return f"{platform.python_implementation().lower()}-{platform.python_version()}"


def _everything() -> Iterator[str]:
    yield from _reference()
    for name in sorted(sys.builtin_module_names):
        yield _docstrings(name)
    yield from _sources()


def _reference() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        return
    for name in sorted(topics):
        yield topics[name]


def _docstrings(module_name: str) -> str:
    """The docstrings of a module and of its public members, as one document."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return ""
    parts = [f"{module_name}\n\n{_doc(module)}"]
    for name, member in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(member) or not callable(member):
            continue
        parts.append(f"{module_name}.{name}\n\n{_doc(member)}")
        if inspect.isclass(member):
            methods = sorted((key, value) for key, value in vars(member).items() if not key.startswith("_"))
            parts += [f"{module_name}.{name}.{key}\n\n{_doc(value)}" for key, value in methods if _doc(value)]
    return "\n\n".join(parts) + "\n"


def _doc(thing: object) -> str:
    text = getattr(thing, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _sources() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [
        path
        for path in paths
        if SKIPPED.isdisjoint(path.parts) and not path.name.startswith("_sysconfigdata")
    ]
    for path in sorted(kept, key=lambda path: path.as_posix()):
        try:
            yield (root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
