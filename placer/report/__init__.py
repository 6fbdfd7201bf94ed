"""Show a plan as tables in a terminal, as an HTML page, or as a trace, without importing torch."""

from placer.report.figures import (
    LARGEST_HEADERS,
    host_text,
    host_verdict,
    largest_rows,
    moment_text,
    needs_text,
    overflow_text,
    relative_difference,
    unknown_memory_text,
)
from placer.report.html import write_html
from placer.report.text import plan_table
from placer.report.timeline import write_trace

__all__ = [
    "LARGEST_HEADERS",
    "host_text",
    "host_verdict",
    "largest_rows",
    "moment_text",
    "needs_text",
    "overflow_text",
    "plan_table",
    "relative_difference",
    "unknown_memory_text",
    "write_html",
    "write_trace",
]
