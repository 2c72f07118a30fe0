"""`grape`: the command line. The subcommands are the modules of `grape_pe.commands`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import COMMANDS
from .commands.errors import BAD_INPUT, DIVERGED, CommandError
from .commands.parsers import Parser, Run, add_import, wrapped
from .commands.train import refuse_unknown
from .encodings.own import import_modules
from .lab.errors import Diverged, LabError

ABOUT = """Position encodings for Transformers: use them, train with them, compare them.

Exit codes: 0 success; 1 grape doctor found a problem; 2 usage error (the message says what to change);
3 training diverged; 130 or 143 stopped by Ctrl-C or SIGTERM (a training run saves a checkpoint first)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        options, left = parser().parse_known_args(argv)
        if left:
            refuse_unknown(options, left)
        import_modules([*getattr(options, "imports", ()), *getattr(options, "imports_after", ())])
        run: Run = options.run
        return run(options)
    except Diverged as problem:
        return _fail(problem, DIVERGED)
    except (CommandError, LabError, ImportError) as problem:
        return _fail(problem, BAD_INPUT)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        sys.stderr.close()
        return 0


def _fail(problem: Exception, code: int) -> int:
    print(f"grape: {problem}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    example = "Example:\n  grape compare demo --out results/demo\n\nA command's help: grape COMMAND --help"
    top = Parser(prog="grape", description=wrapped(ABOUT), epilog=example)
    top.add_argument("--version", action="version", version=f"grape-pe {__version__}")
    add_import(top, "imports", "import your module of encodings (Python's path or this folder)")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parsers(commands)
    return top


if __name__ == "__main__":
    raise SystemExit(main())
