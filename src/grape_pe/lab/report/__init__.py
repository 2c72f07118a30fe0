"""Reports of comparisons and training runs: a self-contained page, tables for terminals and Markdown, JSON.

`reading`, `runs` turn directories into `results` · `statistics`, `ranking`, `verdict` say what they mean ·
`cells`, `tables`, `text` write tables · `curves`, `scores`, `picture_figures` draw · `page` writes the HTML.
"""

from .page import report_page, write_report
from .reading import read_results
from .results import Results
from .text import markdown, results_json, summary, table

__all__ = [
    "Results",
    "markdown",
    "read_results",
    "report_page",
    "results_json",
    "summary",
    "table",
    "write_report",
]
