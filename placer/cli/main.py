"""The ``placer`` command. Every subcommand has its own file, which is imported when the command runs."""

from __future__ import annotations

import functools
import gc
import importlib
import keyword
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from placer.cli.findings import print_error_as
from placer.cli.options import with_option_groups
from placer.cli.output import EXIT_NO_FIT, EXIT_USAGE, print_error_json
from placer.errors import BudgetError, PlacerError, PlanError
from placer.spec import PlacementSpec
from placer.spec.load import errors_located
from placer.versions import explain_failed_import

_COMMANDS = (
    "auto", "fit", "plan", "check", "import", "export", "simulate", "verify", "schema", "report",
    "explain", "diff", "what-if", "profile", "calibrate", "machine", "doctor",
)  # fmt: skip
EXIT_INTERRUPTED = 130  # the exit code that shells use for a command that Ctrl-C ended
_TRACEBACK = "PLACER_TRACEBACK"  # variable to show tracebacks of exceptions in the model's code


class _Commands(TyperGroup):
    """The group of all commands; the module of a command is imported when the command runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_") + "_" * keyword.iskeyword(cmd_name)
        module = importlib.import_module(f"placer.cli.{name}")
        function = getattr(module, name)
        single = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        first, *_ = (function.__doc__ or "").split("\n")
        register = single.command(cmd_name, epilog=f"Example:  {module.EXAMPLE}", short_help=first)
        register(_with_error_output(with_option_groups(function)))
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        """Like click's; with ``--json``, usage errors are also printed as JSON."""
        arguments = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            return super().invoke(ctx)
        except Exception as error:
            usage = any(kind.__name__ == "UsageError" for kind in type(error).__mro__)
            option = str(getattr(error, "option_name", ""))
            if option.lstrip("-").replace("-", "_") in PlacementSpec.model_fields:
                hint = f'write it there, or try it with "placer what-if {option}"'
                cast(Any, error).message += f". It is a field of the spec: {hint}"
            if not usage or "--json" not in arguments:
                raise
            message = cast(Any, error).format_message()
            shown = PlacerError("arguments", message, "see placer COMMAND --help")
            print_error_json(shown, EXIT_USAGE, kind="UsageError")
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like click's, which suggests the nearest of ``commands`` for an unknown one."""
        self.commands = cast(Any, dict.fromkeys(_COMMANDS))
        return super().resolve_command(ctx, args)


def _with_error_output(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``command``: print errors to stderr (with ``--json`` to stdout as JSON) and set exit codes."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        spec = kwargs.get("spec")
        form = kwargs.get("form") or ("json" if kwargs.get("as_json") else "text")

        def failed(error: PlacerError, code: int = EXIT_USAGE) -> typer.Exit:
            """Print ``error``, and return the exception that ends the command with ``code``."""
            print(f"error: {error}", file=sys.stderr)
            print_error_as(form, error, code, None if spec is None else str(spec))
            return typer.Exit(code)

        try:
            with explain_failed_import(), errors_located(spec):
                command(*args, **kwargs)
        except PlacerError as error:
            code = EXIT_NO_FIT if isinstance(error, BudgetError) else EXIT_USAGE
            raise failed(_with_source(error, spec), code) from None
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            interrupted = PlacerError("", "interrupted")
            raise failed(interrupted, EXIT_INTERRUPTED) from None
        except (Exception, SystemExit) as error:
            raise failed(_model_failure(error)) from None

    return run


def _model_failure(error: BaseException) -> PlacerError:
    """The error to print for one that the model's code raised; raises ``error`` again if other code did."""
    if "torch" not in sys.modules:
        raise error
    from placer.importing import user_failure, user_location

    is_exit = isinstance(error, SystemExit)
    if not is_exit and (not user_location(error) or _TRACEBACK in os.environ):
        raise error
    failure = user_failure("the model", "its code", error)
    failure.remedy += f"; set {_TRACEBACK}=1 to see the traceback"
    return failure


def _with_source(error: PlacerError, spec: object) -> PlacerError:
    """``error``, with the name of the command's plan file if it is about an unnamed plan."""
    if isinstance(error, PlanError) and error.where == PlanError.UNNAMED and spec is not None:
        remedy = f"plan again: placer plan MODEL SPEC --input … -o {spec}"
        return PlanError(str(spec), error.problem, remedy)
    return error


app = typer.Typer(
    cls=_Commands,
    name="placer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: options beside their texts, nothing cut at 80 columns
    help="Place a PyTorch model on devices: model-parallel inside a replica, data-parallel across "
    "replicas, from one spec. Exit codes: 0 success; 1 a difference was found; 2 bad "
    "usage or a bad spec; 3 the placement does not fit.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from placer import __version__
        from placer.versions import found_release

        print(f"placer {__version__} (torch {found_release('torch') or 'is not installed'})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Makes typer build a group even though no command is registered with it."""


# New objects between two runs of the garbage collector. With Python's default of 2,000, it scans all
# of torch's modules many times, which is a fifth of the time to plan a ResNet50.
_GARBAGE_THRESHOLD = 200_000


def main() -> None:
    """The entry point of the ``placer`` script."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    logging.getLogger("placer").setLevel(logging.INFO)
    logging.getLogger("placer").addHandler(logging.StreamHandler())
    try:
        app(prog_name="placer")
    except KeyboardInterrupt:  # before a command began
        print("error: interrupted", file=sys.stderr)
        _leave()
    except SystemExit as left:
        if left.code == EXIT_INTERRUPTED:
            _leave()
        raise


def _leave() -> NoReturn:
    """Exit at once, without Python's cleanup, which can take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)
