"""`grape report DIR…`: rebuild or merge the report of comparisons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add `report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="write the report of one or several comparisons",
        description="Read directories written by `grape compare` and write one self-contained page.\n"
        "Several directories are merged: the same encoding under the same recipe counts as more seeds.",
        epilog="Example: grape report out/small out/small-more-seeds --out both.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the first directory)")
    parser.add_argument("--json", action="store_true", help="print the ranking as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from ..lab.report import read_results, report_page, results_json, table
    from ..lab.report.page import write_page
    from ..lab.report.verdict import verdict

    results = read_results(options.directories)
    out = write_page(report_page(results), options.out or options.directories[0] / "report.html")
    if options.json:
        print(json.dumps({**results_json(results), "report": str(out)}, indent=2))
        return 0
    print(table(results))
    print(f"\n{verdict(results).headline}\n")
    for note in results.notes:
        print(f"Note: {note}")
    print(f"Report: {out}")
    return 0
