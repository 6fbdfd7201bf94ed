"""The ``placer`` command, also as ``python -m placer``: Ctrl-C is one line from the first import on."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as a shell has it for a command that Ctrl-C ended


def main() -> None:
    """The entry point of the ``placer`` script."""
    try:
        from placer.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
