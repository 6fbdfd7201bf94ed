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

from placer.errors import PlacerError, first_few, nearest, path_remedy

_FORM = "write package.module:callable or path/file.py:callable"
_SHOWN = 8  # how many callables of a file or module are listed
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(traceback.__file__).parent


class ModelError(PlacerError):
    """MODEL cannot be found, or the user's own code raised an exception."""


def find_callable(target: str) -> Callable[..., Any]:
    """Import the callable that ``target`` names. Raises ``ModelError`` with the nearest name."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise _names_none(target)
    module = _load(place, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _no_callable(place, part, _callables(found), target)
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(target, f"{name!r} is a {type(found).__name__}, not a callable", "")
    wanted: Callable[..., Any] = found
    return wanted


# In what torch says where it has no CUDA device.
_NO_GPU = (
    "NVIDIA driver",
    "not compiled with CUDA enabled",
    "No CUDA GPUs",
    "invalid device ordinal",
)


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
    if any(text in str(error) for text in _NO_GPU):
        return (
            "nothing of a plan needs one: for a model that moves its layers to devices, give "
            "--ignore-device-moves; 'placer import' writes them into a spec"
        )
    return "the exception is from your own code: fix it there"


def user_location(error: BaseException) -> str:
    """``file.py:line`` of the innermost frame of the user's code that placer called, or ``""``.

    Frames of Python's library, torch and placer do not count, nor do the frames that called placer.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if _HERE in Path(frame.filename).parents]
    for frame in reversed(frames[ours[0] :] if ours else frames):
        around = Path(frame.filename).parents
        in_python = _PYTHON in around and _PYTHON / "site-packages" not in around
        if not (frame.filename.startswith("<") or in_python or {_TORCH, _HERE} & {*around}):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _names_none(target: str) -> ModelError:
    """The error for a MODEL without a callable; it lists the callables of a file."""
    place = target.strip(":")
    if "." in place and not _is_file(place):
        module, _, last = place.rpartition(".")
        return ModelError(target, "names no callable", f"did you mean {module}:{last}?")
    if not Path(place).is_file():
        return ModelError(target, "names no callable", _FORM)
    known = _callables(_load_file(Path(place), target))
    has = f"; {place} has {', '.join(first_few(known, _SHOWN))}" if known else ""
    return ModelError(target, "names no callable", f"{_FORM}{has}")


def _no_callable(place: str, part: str, known: list[str], target: str) -> ModelError:
    """The error for a name ``part`` that ``place`` does not have; ``known`` are the names it has."""
    near = nearest(part, known)
    some = ", ".join(first_few(known, _SHOWN)) or "none"
    hint = f"did you mean {place}:{near}?" if near else f"it has {some}"
    return ModelError(target, f"{place} has no callable {part!r}", hint)


def _is_file(place: str) -> bool:
    """Does the part before the colon name a file rather than a module?"""
    return place.endswith(".py") or "/" in place


def _load(place: str, target: str) -> ModuleType:
    return _load_file(Path(place), target) if _is_file(place) else _import(place, target)


def _load_file(path: Path, target: str) -> ModuleType:
    """Import the file at ``path``. Raises ``ModelError`` if it does not exist or cannot be imported."""
    if not path.is_file():
        hint = path_remedy(path, lambda beside: beside.suffix == ".py")
        raise ModelError(target, f"no such file: {path}", hint)
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
        near = _nearest_module(missing)
        hint = f"did you mean {near}?" if near else "check the name, and that it is installed"
        raise ModelError(target, f"no module named {missing!r}", hint) from None
    except (Exception, SystemExit) as error:
        raise _import_failure(target, name, error) from error


def _import_failure(target: str, name: str, error: BaseException) -> ModelError:
    if isinstance(error, SyntaxError):
        location = f"{error.filename}:{error.lineno}"
        return ModelError(location, f"is not Python: {error.msg}", f"fix that line ({target})")
    return user_failure(target, f"importing {name}", error)


def _nearest_module(missing: str) -> str | None:
    """The module in the same package whose name is nearest to ``missing``, or None."""
    parent, dot, last = missing.rpartition(".")
    try:
        paths = importlib.import_module(parent).__path__ if parent else sys.path
    except (ImportError, AttributeError):
        return None
    near = nearest(last, [module.name for module in pkgutil.iter_modules(paths)])
    return f"{parent}{dot}{near}" if near else None


def _callables(place: Any) -> list[str]:
    """Names of the callables in a module or class; only those that it defines itself, if there are any."""
    name = getattr(place, "__name__", "")
    public = [(key, value) for key, value in vars(place).items() if not key.startswith("_")]
    own = [k for k, v in public if callable(v) and getattr(v, "__module__", "") == name]
    return own or [key for key, value in public if callable(value)]


def _prefer(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
