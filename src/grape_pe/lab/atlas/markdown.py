"""The atlas as Markdown, for docs/atlas.md and the table in the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..report.cells import Cell, Table
from .entries import HEAD_DIM, HEADS, WIDTH, AtlasEntry

README_HEADS = (
    "what it does to q and k, or to the score", "bias", "special cases", "learned", "relative law",
)  # fmt: skip
COLUMNS = ("bias", "laws kept", "bytes in a cache", "parameters")


def readme_table(entries: Sequence[AtlasEntry]) -> str:
    """The table of the README."""
    rows = []
    for each in entries:
        facts = each.facts
        texts = (facts.about, each.bias, facts.recovers, facts.learned, each.relative)
        rows.append((each.name, [Cell(text) for text in texts]))
    return Table("readme", "", "", README_HEADS, rows, first="name").markdown() + "\n"


def atlas_markdown(entries: Sequence[AtlasEntry]) -> str:
    """A table of all encodings, then a section about each."""
    rows = []
    for each in entries:
        size = (f"+{each.extra_bytes:,}", f"{each.parameters:,}")
        texts = (each.bias, ", ".join(each.laws.kept()), *size)
        rows.append((each.name, [Cell(text) for text in texts]))
    table = Table("atlas", "", "", COLUMNS, rows).markdown(lambda name: f"[`{name}`](#{name})")
    return "\n".join([f"{table}\n", *(line for each in entries for line in _lines(each))])


def _lines(entry: AtlasEntry) -> Iterator[str]:
    facts = entry.facts
    yield f"## {entry.name}\n"
    if facts.formula:
        yield f"{facts.about[0].upper()}{facts.about[1:]}.\n"
        yield f"    {facts.formula}\n"
        yield f"- Group element: {_code_marks(facts.group)}."
        if facts.recovers:
            yield f"- Contains: {facts.recovers}."
        yield f"- Learned: {facts.learned or 'nothing'}."
        yield f"- Source: {facts.source}."
    yield f"- Relative law: {entry.relative}." + (f" By default not: {entry.broken}." if entry.broken else "")
    options = ", ".join(f"`{each}`" for each in listed_options(entry.options))
    yield f"- Options: {options or 'none'}."
    yield f"- Build: `{build_call(entry)}`\n"


def _code_marks(text: str) -> str:
    """Escape underscores and carets."""
    return text.replace("_", "\\_").replace("^", "\\^")


def listed_options(options: Mapping[str, Any]) -> list[str]:
    """name=default for each."""
    return [f"{name}={value!r}" for name, value in options.items()]


def build_call(entry: AtlasEntry) -> str:
    width = f", width={WIDTH}" if entry.contextual else ""
    return f'grape.build("{entry.name}", heads={HEADS}, head_dim={HEAD_DIM}{width})'
