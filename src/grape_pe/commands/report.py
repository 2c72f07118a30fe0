"""`grape report DIR…`: the report of comparisons and of training runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..extras import require
from .errors import OK, CommandError
from .parsers import Commands, add_command

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
    add = parser.option
    add("places", "DIR", "directories or JSONL files", nargs="+", type=Path)
    add("--out", "FILE", "the page (default: report.html in the first directory)", type=Path)
    parser.flag("--markdown", "print Markdown instead of writing a page")
    about = "write the results of one comparison to FILE, for grape compare --from, instead of a page"
    add("--jsonl", "FILE", about, type=Path)
    about = "of runs of grape train: the paper's tables and loss figures, ours beside the published scores"
    parser.flag("--paper", about)
    parser.flag("--json")


def run_report(options: argparse.Namespace) -> int:
    require("plotly", "lab")
    from ..lab.compare.archive import write_archive
    from ..lab.report import markdown, read_results, report_page, results_json, summary
    from ..lab.report.page import write_page
    from ..lab.report.paper import headline, paper_json, paper_markdown, paper_page
    from ..lab.report.repeated import repetitions

    first: Path = options.places[0]
    if options.jsonl:
        if options.paper:
            raise CommandError("--jsonl writes the results of one comparison; leave out --paper")
        if len(options.places) != 1:
            raise CommandError(f"--jsonl takes one directory of grape compare, got {len(options.places)}")
        print(f"Results: {write_archive(first, options.jsonl)}")
        return OK
    if options.paper:
        found = repetitions(options.places)
        text, page, numbers = paper_markdown(*found), paper_page(*found), paper_json(*found)
        lines = [headline(found[0]), *found[1]]
    else:
        results = read_results(options.places)
        text, page, numbers = markdown(results), report_page(results), results_json(results)
        lines = [summary(results)]
    if options.markdown:
        print(text, end="")
        return OK
    name = "paper.html" if options.paper else "report.html"
    out = write_page(page, options.out or (first if first.is_dir() else first.parent) / name)
    if options.json:
        print(json.dumps({**numbers, "report": str(out)}, indent=2))
    else:
        print("\n".join([*lines, f"Report: {out}"]))
    return OK
