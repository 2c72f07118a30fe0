"""Reports of comparisons: one self-contained page, a table for terminals, JSON for scripts.

`results` reads directories · `statistics`, `ranking`, `verdict` say what they mean · `curves`, `scores`,
`picture_figures` draw · `page` writes the HTML.
"""

from .page import report_page, write_report
from .results import Results, read_results
from .text import results_json, table

__all__ = ["Results", "read_results", "report_page", "results_json", "table", "write_report"]
