"""`grape atlas`: all encodings on one page, measured here."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command, names

EXAMPLE = "grape atlas --out atlas.html\n  grape atlas --encodings rope,fox,grape-ap"


def add_parsers(commands: Commands) -> None:
    about = (
        "Write one self-contained page about every encoding: formula, group element, laws as measured numbers,\n"
        "cache, cost of a step relative to rope on this machine, bias against distance and reach at the start,\n"
        "source, options. Takes less than a minute. With --import MODULE your own encodings are on it too."
    )
    parser = add_command(commands, "atlas", run_atlas, "write a page about every encoding", EXAMPLE, about)
    parser.option("--encodings", "NAMES", "names separated by commas (default: all)", type=names)
    parser.option("--out", "FILE", "the page", Path("atlas.html"), Path)
    parser.flag("--quiet")


def run_atlas(options: argparse.Namespace) -> int:
    require("plotly", "lab")
    from .. import encodings
    from ..lab.atlas.entries import built, measure_all
    from ..lab.atlas.page import atlas_page
    from ..lab.progress import ProgressLine
    from ..lab.report.page import write_page

    which = options.encodings or encodings.names()
    for name in which:
        built(name)  # a mistake is reported before anything is measured
    line = ProgressLine("atlas", 0, len(which), options.quiet)
    try:
        entries = measure_all(which, line.show)
    finally:
        line.close()
    print(f"Atlas: {write_page(atlas_page(entries), options.out)}")
    return OK
