"""The table of a model zoo: a row per model, with what was checked and whether it passed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import write_result

_NOTE = """\
Every model has random weights from its configuration and a small input (batch of two); nothing is
downloaded. *Passed*: planned for 2 and 4 stages from an instance on `meta`; under both plans equal to
eager in train mode (outputs, loss, every gradient and buffer) and in eval mode (outputs), in float64 to
1e-9 of each tensor's largest value where the model runs in float64, else float32 to 1e-4 (a gradient
as small as the rounding error of the largest, such as that of a bias before a norm, to ten times what
eager moves it by when every weight changes by its rounding error); captured again after a plain forward,
the same program (same fingerprint), or placed after it and equal, if the model keeps something of that
call; at least five pieces to cut
between; and of two stages none with more than 60% of the seconds of forward and backward (the plan's
own figures), unless no cut of the program's order is better by a hundredth.
*Another batch*: three rows through the module that was captured with two, in eval mode.
Each model ran in its own process with limits on processor time and memory.
"""


def write_table(
    library: str,
    names: Sequence[str],
    verdicts: Mapping[str, Mapping[str, Any]],
    packages: Sequence[str],
) -> None:
    """Write ``results/zoo_<library>.md``, with the versions of ``packages``."""
    judged = [verdicts[name] for name in names if name in verdicts]
    passed = sum(v["passed"] for v in judged)
    equal = sum(v["other_batch"] == "equal" for v in judged)
    eager = sum(v["other_batch"] not in ("", "eager fails") for v in judged)
    large = [v["name"] for v in judged if v["passed"] and v["largest_share"] > 0.6]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    summary = (
        f"{passed} of {len(judged)} models passed ({len(names)} in the zoo, {versions}); "
        f"another batch size: {equal} of {eager}. One of two stages has more than 60% of the cost in "
        f"{len(large)}{': ' if large else ''}{', '.join(large)}."
    )
    write_result(
        f"zoo_{library}",
        f"Model zoo: {library}",
        f"python -m benchmarks.zoo {library}",
        [
            "model",
            "nodes",
            "pieces",
            "share of 2",
            "of 4",
            "dtype",
            "another batch",
            "capture s",
            "s",
            "passed",
        ],
        [_row(v) for v in judged],
        f"{summary}\n\n{_NOTE}",
    )


def _row(v: Mapping[str, Any]) -> list[object]:
    verdict = "yes" if v["passed"] else f"**no**: {_short(v['problem'])}"
    if v["passed"] and v["whole"]:
        layers = _short(", ".join(layer or "all of it" for layer in v["whole"]), 60)
        reasons = "; ".join(dict.fromkeys(v.get("reasons", ())))
        verdict += f" (whole: {layers}: {reasons})" if reasons else f" (whole: {layers})"
    share = f"{v['largest_share']:.0%}" if v["nodes"] else ""
    if v["largest_share"] > 0.6:
        share += f" (best {v['best_share']:.0%})"
    four = f"{v['largest_share_4']:.0%}" if v["nodes"] else ""
    return [
        v["name"],
        v["nodes"],
        v["pieces"],
        share,
        four,
        v["dtype"],
        _short(v["other_batch"], 60),
        v.get("capture_seconds", ""),
        v["seconds"],
        verdict,
    ]


def _short(text: str, most: int = 200) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
