"""Readers of the documents of one file: plain text, JSON lines, parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ...extras import require
from ..errors import LabError

TEXT_DOCUMENT = 1 << 16  # characters after which a text is cut at a line end, so that a part can be held out
TEXT_SEPARATOR = "<|endoftext|>"


class Reader:
    """Documents of a file from number `item` on; the attribute `item` is the number of the next one."""

    item = 0
    fraction = 0.0

    def read(self, path: Path, field: str, item: int) -> Iterator[str]:
        raise NotImplementedError


class TextReader(Reader):
    """Documents are separated by lines `<|endoftext|>`; long ones are cut at line ends."""

    def read(self, path: Path, field: str, item: int) -> Iterator[str]:
        size = max(1, path.stat().st_size)
        with open(path, encoding="utf-8", newline="") as file:
            done = 0
            try:
                for number, text in enumerate(self._documents(file)):
                    done += len(text)
                    self.item, self.fraction = number + 1, min(1.0, done / size)
                    if number >= item:
                        yield text
            except UnicodeDecodeError as error:
                raise LabError(
                    f"{path} is not UTF-8 text ({error.reason}); convert it to UTF-8 or leave it out"
                ) from error

    def _documents(self, file: TextIO) -> Iterator[str]:
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


class JsonLinesReader(Reader):
    """One JSON object per line; the document is one of its fields."""

    def read(self, path: Path, field: str, item: int) -> Iterator[str]:
        size, done = max(1, path.stat().st_size), 0
        with open(path, "rb") as file:
            for number, line in enumerate(file):
                done += len(line)
                self.item, self.fraction = number + 1, done / size
                if number >= item and line.strip():
                    yield self._text(f"{path}, line {number + 1}", line, field)

    def _text(self, place: str, line: bytes, field: str) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LabError(
                f"{place} is not a JSON object ({error}); a jsonl file has one per line"
            ) from error
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


class ParquetReader(Reader):
    """The document is a row of one column."""

    def read(self, path: Path, field: str, item: int) -> Iterator[str]:
        file = self._open(path, field)
        first, rows = 0, max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if first + count > item:
                for number, text in enumerate(self._column(path, file, group, field), first):
                    self.item, self.fraction = number + 1, (number + 1) / rows
                    if number >= item:
                        yield text
            first += count

    def _open(self, path: Path, field: str) -> Any:
        arrow = require("pyarrow", "lab")
        try:
            file = require("pyarrow.parquet", "lab").ParquetFile(path)
        except (arrow.ArrowException, OSError) as error:
            raise LabError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
        columns = {column.name: column.type for column in file.schema_arrow}
        types = arrow.types
        if field not in columns or not (
            types.is_string(columns[field]) or types.is_large_string(columns[field])
        ):
            listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
            raise LabError(
                f"{path} has no column {field!r} of text; it has {listed}: choose one with --field"
            )
        return file

    def _column(self, path: Path, file: Any, group: int, field: str) -> list[str]:
        try:
            values = file.read_row_group(group, columns=[field]).column(0).to_pylist()
        except (require("pyarrow", "lab").ArrowException, OSError) as error:
            raise LabError(f"{path} is damaged in row group {group}: {str(error).splitlines()[0]}") from error
        return [text or "" for text in values]


_READERS: dict[str, type[Reader]] = {
    ".txt": TextReader,
    ".md": TextReader,
    ".rst": TextReader,
    ".json": JsonLinesReader,
    ".jsonl": JsonLinesReader,
    ".parquet": ParquetReader,
}
KINDS = tuple(_READERS)


def reader_of(path: Path) -> Reader:
    """By the file's suffix; unknown ones are read as text."""
    return _READERS.get(path.suffix, TextReader)()
