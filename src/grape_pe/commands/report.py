"""`grape report DIR…`: rebuild or merge the report of comparisons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..extras import require
from .errors import OK
from .parsers import Commands, add_command, add_json

EXAMPLE = "grape report results/small results/more-seeds --out both.html"


def add_parsers(commands: Commands) -> None:
    about = (
        "Read directories written by grape compare and write one self-contained page. Several are merged:\n"
        "the same encoding under the same recipe counts as more seeds; other recipes are flagged."
    )
    parser = add_command(commands, "report", run_report, "write the report of comparisons", EXAMPLE, about)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the first directory)")
    add_json(parser)


def run_report(options: argparse.Namespace) -> int:
    require("plotly", "lab")
    from ..lab.report import read_results, report_page, results_json, table
    from ..lab.report.page import write_page
    from ..lab.report.verdict import verdict

    results = read_results(options.directories)
    out = write_page(report_page(results), options.out or options.directories[0] / "report.html")
    if options.json:
        print(json.dumps({**results_json(results), "report": str(out)}, indent=2))
        return OK
    print(table(results))
    said = verdict(results)
    print(f"\n{said.headline}")
    print("".join(f"  {sentence}\n" for sentence in said.details), end="")
    for note in results.notes:
        print(f"Note: {note}")
    print(f"Report: {out}")
    return OK
