"""``placer explain``: why the stages of a saved plan end where they do."""

from __future__ import annotations

from placer.cli.options import Saved
from placer.cli.output import human_console

EXAMPLE = "placer explain plan.json"


def explain(plan: Saved) -> None:
    """Explain why each stage of a saved plan ends where it does, and what the next best place would cost.

    For a spec, add --explain to 'placer plan MODEL SPEC …'.
    """
    from placer.plan.store import load_plan
    from placer.plan.summary import plan_facts, summarize_stage

    found = load_plan(plan)
    console = human_console(as_json=False)
    lines = [" · ".join(plan_facts(found)), *map(summarize_stage, found.stages)]
    console.print("\n".join([*lines, "", found.explain()]), markup=False, soft_wrap=True)
