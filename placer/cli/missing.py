"""What ``placer`` says where packages that it needs are not installed; this file needs none of them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from placer.versions import PYTHON, RANGES, Range, found_release

_EXIT_USAGE = 2


def explain_missing(error: ModuleNotFoundError, arguments: Sequence[str]) -> int:
    """Print what is missing, for ``placer doctor`` as a list; returns the exit code.

    Raises ``error`` again if it is about another package than those that placer needs.
    """
    name = (error.name or "").partition(".")[0].replace("yaml", "pyyaml")
    missing = [each for each in RANGES if found_release(each.package) is None]
    if name not in [each.package for each in RANGES]:
        raise error
    command = f"python -m pip install {shlex.join(each.requirement for each in missing)}"
    if arguments[:1] != ["doctor"]:
        print(
            f"error: {name}: is not installed, and placer needs it\n  -> {command}; "
            "'placer doctor' lists all packages",
            file=sys.stderr,
        )
    elif "--json" in arguments:
        packages = [
            {"package": p.package, "release": found_release(p.package), "status": _status(p)}
            for p in (PYTHON, *RANGES)
        ]
        print(json.dumps({"ok": False, "packages": packages}, indent=2))
    else:
        for each in (PYTHON, *RANGES):
            release = found_release(each.package) or "-"
            print(f"{each.package:12}  {release:12}  {_status(each):9}  (run with {each})")
        print(f"\nplacer cannot run without what is missing:\n  {command}")
    return _EXIT_USAGE


def _status(tested: Range) -> str:
    release = found_release(tested.package)
    if release is None:
        return "missing"
    try:
        return "in range" if release in tested else "outside"
    except ModuleNotFoundError:  # packaging itself, which compares releases
        return "installed"
