"""The ``placer`` command, also as ``python -m placer``: Ctrl-C is one line from the first import on.

Where a package is missing that every command needs, all say what ``placer doctor`` says.
"""

from __future__ import annotations

import json
import sys

_INTERRUPTED = 130  # as a shell has it for a command that Ctrl-C ended


def main() -> None:
    """The entry point of the ``placer`` script."""
    try:
        try:
            from placer.cli.main import main as run_command
        except ModuleNotFoundError:
            if _say_what_is_missing():
                sys.exit(2)
            raise
        run_command()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def _say_what_is_missing() -> bool:
    """Returns False if nothing is."""
    from placer.cli.installed import examine, report

    found = examine()
    if all(each["release"] for each in found["packages"]):
        return False
    asked = sys.argv[1:2] == ["doctor"]
    text = json.dumps(found, indent=2) if asked and "--json" in sys.argv else report(found)
    print(text.rstrip(), file=sys.stdout if asked else sys.stderr)
    return True


if __name__ == "__main__":
    main()
