"""The ``placer`` command: every subcommand in a file of its own, imported when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, cast

import typer
from typer.core import TyperGroup

from placer.errors import BudgetError, PlacerError

_COMMANDS = (
    "auto",
    "plan",
    "check",
    "simulate",
    "verify",
    "schema",
    "report",
    "profile",
    "demo",
)
EXIT_USAGE, EXIT_NO_FIT = 2, 3


class _Commands(TyperGroup):
    """Commands by name; errors of placer as text on stderr and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        home = f"placer.cli.{cmd_name}"
        if importlib.util.find_spec(home) is None:
            return None
        function = getattr(importlib.import_module(home), cmd_name)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(function)
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As in click, with the nearest command named when there is none."""
        self.commands = cast(Any, dict.fromkeys(_COMMANDS))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PlacerError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(
                EXIT_NO_FIT if isinstance(error, BudgetError) else EXIT_USAGE
            ) from None


app = typer.Typer(
    cls=_Commands,
    name="placer",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Place a PyTorch model on devices: model-parallel inside a replica, data-parallel across "
    "replicas, from one JSON spec. Exit codes: 0 it fits; 2 bad usage or a bad spec; 3 no "
    "placement fits.",
)


@app.callback()
def _root() -> None:
    """Here so that typer makes a group although no command is registered."""


def main() -> None:
    """The entry point of the ``placer`` script."""
    app(prog_name="placer")
