"""Show a plan as tables in a terminal, as an HTML page, or as a trace, without importing torch."""

from placer.report.figures import (
    LARGEST_HEADERS,
    host_text,
    largest_rows,
    moment_text,
    needs_text,
    relative_difference,
    verdict,
    with_simulation,
)
from placer.report.html import write_html
from placer.report.text import plan_table, verdict_style
from placer.report.timeline import write_trace

__all__ = [
    "LARGEST_HEADERS",
    "host_text",
    "largest_rows",
    "moment_text",
    "needs_text",
    "plan_table",
    "relative_difference",
    "verdict",
    "verdict_style",
    "with_simulation",
    "write_html",
    "write_trace",
]
