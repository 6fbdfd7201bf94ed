"""Report: a plan as text and as a page; imports no torch."""

from placer.report.html import write_html
from placer.report.text import plan_table

__all__ = ["plan_table", "write_html"]
