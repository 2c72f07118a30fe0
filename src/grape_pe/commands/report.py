"""`grape report DIR…`: the report of comparisons and of training runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command, add_json

EXAMPLE = "grape report results/small results/more-seeds --out both.html"


def add_parsers(commands: Commands) -> None:
    about = (
        "Read directories written by grape compare or grape train, or files of --jsonl, and write one\n"
        "self-contained page. Several are merged: the same encoding under the same recipe counts as more seeds;\n"
        "other recipes are flagged. Scores of grape eval lm are read from lm_eval*.json in a run's directory, or\n"
        "from a JSON file that is named."
    )
    parser = add_command(
        commands, "report", run_report, "write the report of comparisons or runs", EXAMPLE, about
    )
    parser.add_argument("places", nargs="+", type=Path, metavar="DIR", help="directories or JSONL files")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html in the first directory)"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of writing a page")
    parser.add_argument(
        "--jsonl", type=Path, metavar="FILE",
        help="write the results of one comparison to FILE, for grape compare --from, instead of a page",
    )  # fmt: skip
    parser.add_argument(
        "--paper", action="store_true",
        help="of runs of grape train: the paper's tables and loss figures, ours beside the published scores",
    )  # fmt: skip
    add_json(parser)


def run_report(options: argparse.Namespace) -> int:
    require("plotly", "lab")
    from ..lab.compare.archive import write_archive
    from ..lab.report import markdown, read_results, report_page, results_json, summary
    from ..lab.report.page import write_page

    if options.jsonl:
        if options.paper:
            raise CommandError("--jsonl writes the results of one comparison; leave out --paper")
        if len(options.places) != 1:
            raise CommandError(f"--jsonl takes one directory of grape compare, got {len(options.places)}")
        print(f"Results: {write_archive(options.places[0], options.jsonl)}")
        return OK
    if options.paper:
        return _paper(options)
    results = read_results(options.places)
    if options.markdown:
        print(markdown(results), end="")
        return OK
    out = write_page(report_page(results), _out(options, "report.html"))
    if options.json:
        print(json.dumps({**results_json(results), "report": str(out)}, indent=2))
    else:
        print(f"{summary(results)}\nReport: {out}")
    return OK


def _out(options: argparse.Namespace, name: str) -> Path:
    first: Path = options.places[0]
    return options.out or (first if first.is_dir() else first.parent) / name


def _paper(options: argparse.Namespace) -> int:
    from ..lab.report.page import write_page
    from ..lab.report.paper_page import paper_page
    from ..lab.report.paper_tables import headline, paper_json, paper_markdown
    from ..lab.report.repeated import repetitions

    found, notes = repetitions(options.places)
    if options.markdown:
        print(paper_markdown(found, notes), end="")
        return OK
    out = write_page(paper_page(found, notes), _out(options, "paper.html"))
    if options.json:
        print(json.dumps({**paper_json(found, notes), "report": str(out)}, indent=2))
    else:
        print("\n".join([headline(found), *notes, f"Report: {out}"]))
    return OK
