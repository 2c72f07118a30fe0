"""`grape atlas`: all encodings on one page, measured here."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command

EXAMPLE = "grape atlas --out atlas.html\n  grape atlas --encodings rope,fox,grape-ap"


def add_parsers(commands: Commands) -> None:
    about = (
        "Write one self-contained page about every encoding: formula, group element, laws as measured numbers,\n"
        "cache, cost of a step relative to rope on this machine, bias against distance and reach at the start,\n"
        "source, options. Takes less than a minute. With --import MODULE your own encodings are on it too."
    )
    parser = add_command(commands, "atlas", run_atlas, "write a page about every encoding", EXAMPLE, about)
    parser.add_argument("--encodings", metavar="NAMES", help="names separated by commas (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("atlas.html"), metavar="FILE", help="the page (default: atlas.html)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def run_atlas(options: argparse.Namespace) -> int:
    require("pydantic", "lab")
    from ..encodings import names
    from ..lab.atlas.entries import built, measure_all
    from ..lab.atlas.page import atlas_page
    from ..lab.progress import ProgressLine
    from ..lab.report.page import write_page
    from ..lab.written import split_names

    which = names() if options.encodings is None else split_names(options.encodings)
    if not which:
        raise CommandError(f"--encodings must name at least one encoding, got {options.encodings!r}")
    for name in which:
        built(name)  # a mistake is reported before anything is measured
    line = ProgressLine("atlas", 0, len(which), options.quiet)
    try:
        entries = measure_all(which, line.tell)
    finally:
        line.close()
    print(f"Atlas: {write_page(atlas_page(entries), options.out)}")
    return OK
