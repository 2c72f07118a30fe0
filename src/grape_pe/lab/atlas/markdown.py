"""The atlas as Markdown, for docs/atlas.md and the table in the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .entries import HEAD_DIM, HEADS, WIDTH, AtlasEntry

README_HEAD = (
    "| name | what it does to q and k, or to the score | bias | special cases | learned | relative law |\n"
    "|---|---|---|---|---|---|\n"
)


def readme_table(entries: Sequence[AtlasEntry]) -> str:
    """The table of the README."""
    return README_HEAD + "".join(map(_readme_row, entries))


def _readme_row(entry: AtlasEntry) -> str:
    facts = entry.facts
    recovers, learned = ("", "") if facts is None else (facts.recovers, facts.learned)
    cells = (f"`{entry.name}`", entry.about, entry.bias, recovers, learned or "–", entry.relative)
    return f"| {' | '.join(cells)} |\n"


def atlas_markdown(entries: Sequence[AtlasEntry]) -> str:
    """A table of all encodings, then a section about each."""
    head = "| encoding | bias | laws kept | bytes in a cache | parameters |\n|---|---|---|---|---|\n"
    return "\n".join(
        [head + "".join(map(_row, entries)), *(line for each in entries for line in _lines(each))]
    )


def _row(entry: AtlasEntry) -> str:
    kept, name = ", ".join(entry.laws.kept()), f"[`{entry.name}`](#{entry.name})"
    return f"| {name} | {entry.bias} | {kept} | +{entry.extra_bytes:,} | {entry.parameters:,} |\n"


def _lines(entry: AtlasEntry) -> Iterator[str]:
    facts = entry.facts
    yield f"## {entry.name}\n"
    if facts is not None:
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
