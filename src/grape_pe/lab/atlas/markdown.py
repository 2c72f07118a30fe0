"""The atlas as Markdown: what is the same on every machine. docs/atlas.md and the README's table are made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .entries import HEAD_DIM, HEADS, WIDTH, AtlasEntry

README_HEAD = (
    "| name | what it does to q and k, or to the score | bias | special cases | learned | relative law |\n"
    "|---|---|---|---|---|---|\n"
)


def readme_table(entries: Sequence[AtlasEntry]) -> str:
    """The table of the README, from the facts of each encoding."""
    return README_HEAD + "".join(map(_readme_row, entries))


def _readme_row(entry: AtlasEntry) -> str:
    facts = entry.facts
    recovers, learned = ("", "") if facts is None else (facts.recovers, facts.learned)
    cells = (f"`{entry.name}`", entry.about, entry.bias, recovers, learned or "–", entry.relative)
    return f"| {' | '.join(cells)} |\n"


def atlas_markdown(entries: Sequence[AtlasEntry]) -> str:
    """A table of all encodings, then a section for each."""
    head = "| encoding | bias | laws kept | bytes in a cache | parameters |\n|---|---|---|---|---|\n"
    return "\n".join([head + "".join(map(_row, entries)), *map(_section, entries)])


def _row(entry: AtlasEntry) -> str:
    kept, name = ", ".join(entry.laws.kept()), f"[`{entry.name}`](#{entry.name})"
    return f"| {name} | {entry.bias} | {kept} | +{entry.extra_bytes:,} | {entry.parameters:,} |\n"


def _section(entry: AtlasEntry) -> str:
    return "\n".join([f"## {entry.name}\n", *_lines(entry)])


def _lines(entry: AtlasEntry) -> Iterator[str]:
    facts = entry.facts
    if facts is not None:
        yield f"{_sentence(facts.about)}\n"
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


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _code_marks(text: str) -> str:
    """Underscores and carets are no Markdown."""
    return text.replace("_", "\\_").replace("^", "\\^")


def listed_options(options: Mapping[str, Any]) -> list[str]:
    """name=default for each."""
    return [f"{name}={value!r}" for name, value in options.items()]


def build_call(entry: AtlasEntry) -> str:
    width = f", width={WIDTH}" if entry.contextual else ""
    return f'grape.build("{entry.name}", heads={HEADS}, head_dim={HEAD_DIM}{width})'
