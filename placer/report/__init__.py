"""Show a plan as tables in a terminal, as an HTML page, or as a trace.

`view` makes plain data of a plan once; every form of the report is written from that.
"""

from placer.report.html import plan_frame, spec_table, write_html
from placer.report.text import plan_table, simulation_table
from placer.report.trace import write_trace
from placer.report.verdict import needs_text, verdict
from placer.report.view import with_simulation

__all__ = [
    "needs_text",
    "plan_frame",
    "plan_table",
    "simulation_table",
    "spec_table",
    "verdict",
    "with_simulation",
    "write_html",
    "write_trace",
]
