"""Write the tables of docs/results.md from the stored results, so that no number is typed by hand.

    python tools/results.py

A block begins with <!-- generated: FILE… --> and ends with <!-- end -->; between them stands what
`grape report FILE… --markdown` prints. A block whose files are not there yet says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from grape_pe.lab.report import markdown, read_results

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- generated: (?P<files>[^\n]+?) -->\n.*?<!-- end -->", re.DOTALL)


def generated(text: str, root: Path = ROOT) -> str:
    """The document with every block written anew."""

    def block(found: re.Match[str]) -> str:
        files = [root / name for name in found["files"].split()]
        missing = [file.name for file in files if not file.exists()]
        body = (
            f"Not run yet: there is no {', '.join(missing)}.\n" if missing else markdown(read_results(files))
        )
        return f"<!-- generated: {found['files']} -->\n\n{body}\n<!-- end -->"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    page = ROOT / "docs/results.md"
    page.write_text(generated(page.read_text()))
