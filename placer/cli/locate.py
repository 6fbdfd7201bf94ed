"""Check MODEL and ``--input file.py:callable`` without importing them, and so without torch.

Importing a model takes seconds; here a mistyped name is reported at once. What cannot be known without
importing (names that code generates, packages that find their modules by themselves) is left to
`placer.cli.target`.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from placer.errors import PlacerError, nearest

_FORM = "write package.module:callable or path/file.py:callable"
_SHOWN = 8  # callables of a file
# A file that uses one of these names may define names that do not occur in its text.
_MAKE_NAMES = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__getattr__"})


class ModelError(PlacerError):
    """MODEL cannot be found, or the user's own code raised an exception."""


def is_file(place: str) -> bool:
    """Does the part before the colon name a file, rather than a module?"""
    return place.endswith(".py") or "/" in place


def check_target(target: str) -> None:
    """Raise ``ModelError`` if it is certain that ``target`` names no callable."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise names_none(target)
    path = find_source(place, target)
    if path is not None:
        _check_name(path, place, name, target)


def find_source(place: str, target: str) -> Path | None:
    """The file of ``place``, a path or a module name; None if only an import can find it.

    Raises ``ModelError`` if there is no such file or module.
    """
    if not is_file(place):
        return _module_file(place, target)
    path = Path(place)
    if not path.is_file():
        folder = path.parent
        siblings = [p.name for p in folder.glob("*.py")] if folder.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f"did you mean {folder / near}?" if near else "check the path"
        raise ModelError(target, f"no such file: {path}", hint)
    return path


def not_python(error: SyntaxError, target: str) -> ModelError:
    """The error for a file with a syntax error."""
    return ModelError(
        f"{error.filename}:{error.lineno}",
        f"is not Python: {error.msg}",
        f"mend that line ({target})",
    )


def names_none(target: str) -> ModelError:
    """The error for a MODEL that names no callable; lists those that its file defines."""
    place = target.strip(":")
    known: list[str] = []
    try:
        path = find_source(place, target) if place else None
    except ModelError:
        path = None
    if path is not None:
        with suppress(OSError, ValueError, SyntaxError):
            known = list(_defined_in(ast.parse(path.read_bytes())))
    elif "." in place and not is_file(place):
        module, _, last = place.rpartition(".")
        return ModelError(target, "names no callable", f"did you mean {module}:{last}?")
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    has = f"; {place} has {', '.join(known[:_SHOWN])}{more}" if known else ""
    return ModelError(target, "names no callable", f"{_FORM}{has}")


def no_callable(place: str, part: str, known: Sequence[str], target: str) -> ModelError:
    """The error for a name ``part`` that ``place`` does not have; ``known`` are the names it has."""
    near = nearest(part, known)
    some = ", ".join(known[:_SHOWN])
    hint = f"did you mean {place}:{near}?" if near else f"it has {some or 'none'}"
    return ModelError(target, f"{place} has no callable {part!r}", hint)


def no_module(missing: str, near: str | None, target: str) -> ModelError:
    """The error for a module that is not installed; ``missing`` is its full name."""
    parent = missing.rpartition(".")[0]
    hint = "check the name, and that it is installed"
    if near:
        hint = f"did you mean {parent}.{near}?" if parent else f"did you mean {near}?"
    return ModelError(target, f"no module named {missing!r}", hint)


def _module_file(place: str, target: str) -> Path | None:
    """The file of a module, searched for in the folders of its packages."""
    top, *parts = place.split(".")
    search = [str(Path.cwd()), *sys.path]
    try:
        spec = _top_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        near = nearest(top, [module.name for module in pkgutil.iter_modules(search)])
        raise no_module(top, near, target)
    at = list(spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for depth, part in enumerate(parts, 1):
        found = _inside(at, part)
        if found is None:
            missing = ".".join([top, *parts[:depth]])
            near = nearest(part, [module.name for module in pkgutil.iter_modules(at)])
            if near:
                raise no_module(missing, near, target)
            return None  # a package may find its modules by itself
        file = found if found.suffix == ".py" else found / "__init__.py"
        at = [str(found)] if found.is_dir() else []
    return file if file is not None and file.is_file() else None


def _top_spec(top: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of the top-level module; the working folder goes first, if it has a Python file there."""
    local = None
    if top not in sys.modules:
        local = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    if local is not None and local.origin is not None:
        return local
    return importlib.util.find_spec(top) or local


def _inside(folders: Iterable[str], part: str) -> Path | None:
    for folder in map(Path, folders):
        for path in (folder / part, folder / f"{part}.py"):
            if path.is_dir() or path.is_file():
                return path
    return None


def _check_name(path: Path, place: str, name: str, target: str) -> None:
    """Raise ``ModelError`` if the file's text shows that it does not define ``name``."""
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except SyntaxError as error:
        raise not_python(error, target) from None
    except (OSError, ValueError):
        return  # the import will report what is wrong
    part = name.split(".")[0]
    if any(_makes_names(node) for node in ast.walk(tree)):
        return
    known = list(dict.fromkeys(_names_of(tree)))
    if part not in known and nearest(part, known) is not None:
        raise no_callable(place, part, [k for k in known if not k.startswith("_")], target)


def _makes_names(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Name(id=used) | ast.FunctionDef(name=used):
            return used in _MAKE_NAMES
    return False


def _defined_in(tree: ast.Module) -> Iterator[str]:
    """The public functions and classes of a file, in their order."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if not name.startswith("_"):
                yield name


def _names_of(tree: ast.AST) -> Iterator[str]:
    """All names that are defined anywhere in the file, more than a module has after its import."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.split(".")[0]
