"""Reports of comparisons: one self-contained page, a table for terminals, JSON for scripts.

`reading` turns directories into `results` · `statistics`, `ranking`, `verdict` say what they mean ·
`curves`, `scores`, `picture_figures` draw · `page` writes the HTML.
"""

from .page import report_page, write_report
from .reading import read_results
from .results import Results
from .text import results_json, table

__all__ = ["Results", "read_results", "report_page", "results_json", "table", "write_report"]
