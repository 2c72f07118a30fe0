"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

Commands = Any  # argparse's subparsers action, whose class is private
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands, name: str, run: Run | None, help: str, example: str, description: str = ""
) -> argparse.ArgumentParser:
    """A subcommand with its help and an example; without `run` it only groups others."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=wrapped(description or help[0].upper() + help[1:] + "."),
        epilog=f"Example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_import(parser, "imports_after", argparse.SUPPRESS)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def wrapped(text: str) -> str:
    """Paragraphs at the width of the terminal, for the formatter that keeps the lines of the examples."""
    width = min(shutil.get_terminal_size().columns, 110) - 2
    return "\n\n".join(textwrap.fill(part, width) for part in text.split("\n\n"))


def add_import(parser: argparse.ArgumentParser, dest: str, help: str) -> None:
    """--import, before and after the name of a command; those before are a destination of their own, which
    the parser of the command would overwrite."""
    parser.add_argument(
        "--import", dest=dest, action="append", default=argparse.SUPPRESS, metavar="MODULE", help=help
    )


def positive(text: str) -> int:
    """The type of an option that takes 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """The type of an option that takes 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
