"""The parser of all commands: options with a value, flags, and the types of values."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

from .errors import CommandError

Commands = Any  # argparse's subparsers action, whose class is private
Run = Callable[[argparse.Namespace], int]

#: flags that several commands have
FLAGS = {
    "--json": "print JSON, for scripts",
    "--quiet": "no progress line",
    "--kv-shift": "mix each key and value with the previous one",
}


class Parser(argparse.ArgumentParser):
    """Keeps the lines of the examples; options must be written in full."""

    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": raw, "allow_abbrev": False, **options})

    def option(
        self,
        name: str,
        metavar: str,
        help: str,
        default: Any = None,
        type: Callable[[str], Any] = str,
        **more: Any,
    ) -> None:
        """An option or argument with a value. The help ends with the default, if there is one."""

        def read(text: str) -> Any:
            try:
                return type(text)
            except ValueError as problem:
                raise CommandError(f"{name} {problem}, got {text!r}") from None

        text = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = (
            "" if text in (None, "", [], argparse.SUPPRESS) or "default" in help else f" (default: {text})"
        )
        self.add_argument(name, type=read, default=default, metavar=metavar, help=f"{help}{shown}", **more)

    def flag(self, name: str, help: str = "", **more: Any) -> None:
        self.add_argument(name, action="store_true", help=help or FLAGS[name], **more)


def add_command(
    commands: Commands, name: str, run: Run | None, help: str, example: str, description: str = ""
) -> Parser:
    """A subcommand with its help and an example; without `run` it only groups others."""
    about = wrapped(description or help[0].upper() + help[1:] + ".")
    parser: Parser = commands.add_parser(name, help=help, description=about, epilog=f"Example:\n  {example}")
    add_import(parser, "imports_after", argparse.SUPPRESS)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def wrapped(text: str) -> str:
    """Fill each paragraph to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 110) - 2
    return "\n\n".join(textwrap.fill(part, width) for part in text.split("\n\n"))


def add_import(parser: argparse.ArgumentParser, dest: str, help: str) -> None:
    """--import, before or after the command's name; each has its own destination, as the second parser would
    overwrite the first one's value."""
    parser.add_argument(
        "--import", dest=dest, action="append", default=argparse.SUPPRESS, metavar="MODULE", help=help
    )


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"must be a whole number of at least {least}")
    return int(text)


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def names(text: str) -> list[str]:
    """Names separated by commas; commas in brackets do not separate."""
    from ..lab.written import split_names

    found = split_names(text)
    if not found:
        raise ValueError("must name at least one, separated by commas")
    return found


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    try:
        return [positive(part) for part in names(text)]
    except ValueError:
        raise ValueError("must be whole numbers of at least 1, separated by commas") from None


def or_none(kind: Callable[[str], list[Any]]) -> Callable[[str], list[Any]]:
    """Also accept "none", for an empty list."""
    return lambda text: [] if text == "none" else kind(text)
