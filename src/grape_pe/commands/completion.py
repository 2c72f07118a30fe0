"""`grape completion`."""

from __future__ import annotations

import argparse

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command


def add_parsers(commands: Commands) -> None:
    example = "grape completion bash > ~/.local/share/bash-completion/completions/grape"
    help = "print a script that completes grape in your shell"
    parser = add_command(commands, "completion", run_completion, help, example)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run_completion(options: argparse.Namespace) -> int:
    from ..cli import parser

    print(require("shtab", "lab").complete(parser(), shell=options.shell))
    return OK
