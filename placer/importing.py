"""Import what a text such as ``path/file.py:callable`` names: a model, a loss or example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from placer.errors import nearest
from placer.locate import (
    ModelError,
    find_source,
    is_file,
    names_none,
    no_callable,
    no_module,
    not_python,
)

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def find_callable(target: str) -> Callable[..., Any]:
    """Import the callable that ``target`` names. Raises ``ModelError`` with the nearest name."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise names_none(target)
    module = _load(place, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise no_callable(place, part, _callables(found), target)
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(target, f"{name!r} is a {type(found).__name__}, not a callable", "")
    wanted: Callable[..., Any] = found
    return wanted


def user_failure(target: str, doing: str, error: BaseException) -> ModelError:
    """The error for an exception that the user's code raised while ``doing`` something."""
    location = user_location(error) or target
    if isinstance(error, SystemExit):
        return ModelError(
            location,
            f"{doing} called sys.exit({'' if error.code is None else repr(error.code)})",
            f"put the code of the script under 'if __name__ == \"__main__\":' ({target})",
        )
    text = str(error).strip() or "no message"
    return ModelError(
        location, f"{doing} raised {type(error).__name__}: {text}", f"{_remedy(error)} ({target})"
    )


def _remedy(error: BaseException) -> str:
    """The remedy for an exception that the user's code raised."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing:
        package = missing.partition(".")[0]
        return f"install {package!r} for {sys.executable}, or fix the import"
    return "the exception is from your own code: fix it there"


def user_location(error: BaseException) -> str:
    """``file.py:line`` of the innermost frame of the user's code that placer called, or ``""``.

    Frames of torch and of placer do not count, nor do the frames that called placer.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if _HERE in Path(frame.filename).parents]
    for frame in reversed(frames[ours[0] :] if ours else frames):
        path = Path(frame.filename)
        if not (frame.filename.startswith("<") or _TORCH in path.parents or _HERE in path.parents):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _load(place: str, target: str) -> ModuleType:
    return _load_file(Path(place), target) if is_file(place) else _import(place, target)


def _load_file(path: Path, target: str) -> ModuleType:
    """Import the file at ``path``. Raises ``ModelError`` if it does not exist or cannot be imported."""
    find_source(str(path) if is_file(str(path)) else f"./{path}", target)
    path = path.resolve()
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else ""
    name = name or f"_placer_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(target, f"{path.name} is not a Python file", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look it up there
    _prefer(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(target, path.name, error) from error
    return module


def _import(name: str, target: str) -> ModuleType:
    _prefer(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(missing + "."):
            raise _import_failure(target, name, error) from error
        raise no_module(missing, _nearest_module(missing), target) from None
    except (Exception, SystemExit) as error:
        raise _import_failure(target, name, error) from error


def _import_failure(target: str, name: str, error: BaseException) -> ModelError:
    if isinstance(error, SyntaxError):
        return not_python(error, target)
    return user_failure(target, f"importing {name}", error)


def _nearest_module(missing: str) -> str | None:
    """The module in the same package whose name is nearest to ``missing``, or None."""
    parent, _, last = missing.rpartition(".")
    try:
        paths = importlib.import_module(parent).__path__ if parent else [str(Path.cwd())]
    except (ImportError, AttributeError):
        return None
    return nearest(last, [module.name for module in pkgutil.iter_modules(paths)])


def _callables(place: Any) -> list[str]:
    """Names of the callables in a module or class; only those that it defines itself, if there are any."""
    name = getattr(place, "__name__", "")
    public = [(key, value) for key, value in vars(place).items() if not key.startswith("_")]
    own = [k for k, v in public if callable(v) and getattr(v, "__module__", "") == name]
    return own or [key for key, value in public if callable(value)]


def _prefer(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
