"""Readers of the documents of one file: plain text, JSON lines, parquet.

Each is called with the file, the field that has the text, and the number of the first document to read. It yields
the number of the next document, the share of the file read so far, and the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ...extras import require
from ..errors import LabError

TEXT_DOCUMENT = 1 << 16  # characters after which a text is cut at a line end, so that a part can be held out
TEXT_SEPARATOR = "<|endoftext|>"

Documents = Iterator[tuple[int, float, str]]


def read_text(path: Path, _field: str, first: int) -> Documents:
    """Documents are separated by lines `<|endoftext|>`; long ones are cut at line ends."""
    size, done = max(1, path.stat().st_size), 0
    with open(path, encoding="utf-8", newline="") as file:
        try:
            for number, text in enumerate(_separated(file)):
                done += len(text)
                if number >= first:
                    yield number + 1, min(1.0, done / size), text
        except UnicodeDecodeError as error:
            raise LabError(
                f"{path} is not UTF-8 text ({error.reason}); convert it to UTF-8 or leave it out"
            ) from error


def _separated(file: TextIO) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    for line in file:
        if ends := line.strip() == TEXT_SEPARATOR:
            line = ""
        lines.append(line)
        characters += len(line)
        if ends or characters >= TEXT_DOCUMENT:
            yield "".join(lines)
            lines, characters = [], 0
    yield "".join(lines)


def read_json_lines(path: Path, field: str, first: int) -> Documents:
    """One JSON object per line; the document is one of its fields."""
    size, done = max(1, path.stat().st_size), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            done += len(line)
            if number >= first and line.strip():
                yield number + 1, done / size, _text_in_line(f"{path}, line {number + 1}", line, field)


def _text_in_line(place: str, line: bytes, field: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise LabError(f"{place} is not a JSON object ({error}); a jsonl file has one per line") from error
    if not isinstance(row, dict):
        raise LabError(f"{place} must be a JSON object, got {type(row).__name__}")
    return text_of(row, field, place)


def text_of(row: dict[str, Any], field: str, place: str) -> str:
    text = row.get(field)
    if not isinstance(text, str):
        raise LabError(
            f"{place} has no text in field {field!r}; its fields are {', '.join(row) or 'none'}: "
            "choose one with --field"
        )
    return text


def read_parquet(path: Path, field: str, first: int) -> Documents:
    """The document is a row of one column."""
    file = _opened(path, field)
    number, rows = 0, max(1, file.metadata.num_rows)
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if number + count > first:
            try:
                column = file.read_row_group(group, columns=[field]).column(0).to_pylist()
            except (require("pyarrow", "lab").ArrowException, OSError) as error:
                raise LabError(
                    f"{path} is damaged in row group {group}: {str(error).splitlines()[0]}; copy it again"
                ) from error
            for place, text in enumerate(column, start=number):
                if place >= first:
                    yield place + 1, (place + 1) / rows, text or ""
        number += count


def _opened(path: Path, field: str) -> Any:
    arrow = require("pyarrow", "lab")
    try:
        file = require("pyarrow.parquet", "lab").ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise LabError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
    columns, types = {column.name: column.type for column in file.schema_arrow}, arrow.types
    if field not in columns or not (types.is_string(columns[field]) or types.is_large_string(columns[field])):
        listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        raise LabError(f"{path} has no column {field!r} of text; it has {listed}: choose one with --field")
    return file


#: by suffix; other files are read as text
READERS: dict[str, Callable[[Path, str, int], Documents]] = {
    ".txt": read_text, ".md": read_text, ".rst": read_text, ".json": read_json_lines, ".jsonl": read_json_lines,
    ".parquet": read_parquet,
}  # fmt: skip
