"""The built-in corpus: text of every Python installation, so that nothing is downloaded.

The language reference as `help()` shows it, the docstrings of modules written in C, and the sources of the
standard library and of torch (with their docstrings), in an order that depends on their versions alone.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

MAX_CHARACTERS = 40_000_000

# Tests, tables of characters, generated code, and programs that are not part of the library.
SKIPPED = frozenset(
    {"__pycache__", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
    | {"site-packages", "test", "tests", "turtledemo"}
    | {"testing", "_vendor", "_inductor", "_dynamo"}
)


def builtin_documents() -> list[str]:
    """All distinct documents, up to about MAX_CHARACTERS in total."""
    found: dict[str, None] = {}
    size = 0
    for text in _everything():
        if size >= MAX_CHARACTERS:
            break
        if text.strip() and text not in found:
            found[text] = None
            size += len(text)
    return list(found)


def corpus_name() -> str:
    """The versions whose text the corpus is."""
    python = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    return f"{python}-torch-{torch.__version__.partition('+')[0]}"


def _everything() -> Iterator[str]:
    yield from _reference()
    for name in sorted(sys.builtin_module_names):
        yield _docstrings(name)
    yield from _sources(Path(sysconfig.get_paths()["stdlib"]))
    yield from _sources(Path(torch.__file__).parent)


def _reference() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it separately
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


def _sources(root: Path) -> Iterator[str]:
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
