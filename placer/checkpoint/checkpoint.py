"""`save` and `load`: writes a module's and an optimizer's state to a folder, and restores it from there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from placer.checkpoint import folder as folders
from placer.checkpoint.copies import describe_different_copies, sum_copies
from placer.checkpoint.entries import (
    Contents,
    Entries,
    entry_name,
    model_entries,
    module_state,
    optimizer_entries,
    parameter_names,
    random_entry,
    require_alike_groups,
    restore_optimizer,
    restore_random,
)
from placer.checkpoint.group import CheckpointGroup, checkpoint_group
from placer.checkpoint.sharded import cut_entry, gather_state
from placer.checkpoint.storage import read_entries, record_entries, require_plain, write_entries
from placer.checkpoint.table import UNCHANGED, Record, Table, read_table, write_table
from placer.errors import CheckpointError, first_few

_SHOWN = 8  # how many problems of one kind an error lists


def save(
    module: nn.Module,
    optimizer: Optimizer | None,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save weights, optimizer state and the states of random generators in the folder ``path``.

    Everything is saved under the original model's names, so any other placement and the plain model can
    load it. The folder is written next to ``path`` and renamed when it is complete, so an interrupted
    save does not damage the last checkpoint. ``extra`` is saved with it: numbers, strings, tensors, and
    lists and dicts of them, such as an epoch or ``scheduler.state_dict()``.

    In a job all ranks call this, and ``path`` must be on a file system that all of them share. Rank 0
    warns if copies of a parameter differ between ranks. Raises ``PlacerError`` if ``path`` exists and is
    not a checkpoint, if ``extra`` has other objects, or if writing fails.
    """
    path, extra = Path(path), dict(extra or {})
    saving = folders.saving_folder(path)
    own: Entries = {}
    told = {"path": path.name, "optimizer": optimizer is not None}
    with checkpoint_group(module, "placer.save", **told) as ranks:

        def collect() -> None:
            require_plain(extra, "extra")
            entries = model_entries(module, ranks.contents)
            if optimizer is not None:
                sharded = ranks.pieces.shared
                entries.update(optimizer_entries(module, ranks.contents, optimizer, sharded))
            own.update((k, v) for k, v in entries.items() if _is_saved_here(k, ranks.contents))
            own[f"random/{ranks.rank}"] = random_entry(ranks.devices, ranks.layout)
            if ranks.rank == 0:
                own["extra"] = extra

        ranks.agree(collect)
        if optimizer is not None:
            own.update(gather_state(module, optimizer, ranks))
        if ranks.group is not None:
            warning = describe_different_copies(ranks.gather(sum_copies(module, ranks.contents)))
            if warning and ranks.rank == 0:
                warnings.warn(warning, stacklevel=2)
        ranks.lead(lambda: folders.begin(path))
        ranks.agree(lambda: folders.require_shared(saving))
        written, places = write_entries(own, saving, group=ranks.group)
        table: dict[str, Record] = {}
        ranks.agree(lambda: table.update(record_entries(written, places, saving)))
        whole = {name: record for part in ranks.gather(table) for name, record in part.items()}
        ranks.lead(lambda: write_table(whole, saving))
        ranks.lead(lambda: folders.commit(path))


def load(
    module: nn.Module, optimizer: Optimizer | None, path: str | Path, *, missing_ok: bool = False
) -> dict[str, Any]:
    """Load a checkpoint that `save` wrote under any placement, and return its ``extra``.

    ``module`` is a placed module in one process, a placed module in a job (all ranks call this), or a
    plain ``nn.Module``. Random generators are restored if the job has the same layout (processes,
    replicas, stages). With ``missing_ok`` the result is ``{}`` if no checkpoint has been saved yet. Use
    that instead of testing whether ``path`` exists: after a kill the last checkpoint may be next to
    ``path``, where this function finds it.

    All checksums are verified before anything is changed. Raises ``CheckpointError`` on all ranks if the
    checkpoint is damaged or does not match the module; it lists the entries that are damaged, missing,
    not in the module, or of another shape. Loading runs no code from the checkpoint. A checksum detects
    damage, but does not show who wrote the checkpoint.
    """
    told = {"path": Path(path).name, "optimizer": optimizer is not None}
    with checkpoint_group(module, "placer.load", missing_ok=missing_ok, **told) as ranks:
        if missing_ok and not any(ranks.gather(folders.exists(Path(path)))):
            return {}
        return _load(module, optimizer, Path(path), ranks)


def _load(
    module: nn.Module, optimizer: Optimizer | None, path: Path, ranks: CheckpointGroup
) -> dict[str, Any]:
    contents = ranks.contents
    model = model_entries(module, contents)
    entries: Entries = dict(model)
    tables: list[tuple[Path, Table]] = []
    problems: list[str] = []

    def compare() -> None:
        found = folders.find(path)
        table = read_table(found)
        tables.append((found, table))
        problems.extend(_differences(model, table))
        if optimizer is not None:
            added, missing = _optimizer_entries(module, contents, optimizer, table)
            entries.update(dict.fromkeys(added))
            problems.extend(missing)

    ranks.agree(compare)
    known = {entry for part in ranks.gather(sorted(model)) for entry in part}
    all_problems = {p for part in ranks.gather(problems) for p in part}
    found, table = tables[0]
    saved = {e for e in table if e.startswith("model/")}
    all_problems |= {f"{entry_name(e)} is not in the model" for e in saved - known}
    if all_problems:
        _refuse(path, sorted(all_problems))
    random = f"random/{ranks.rank}"
    entries.update({e: None for e in ("extra", random) if e in table})
    in_place = [entry for entry, value in model.items() if isinstance(value, Tensor)]

    def verify() -> None:
        """Read everything. The model's tensors are read again later, so only one is in memory at a time."""
        named = {} if optimizer is None else parameter_names(module, contents, optimizer)
        parameters = dict(named.values())
        for entry, value in read_entries(entries, table, found):
            if not isinstance(entries[entry], Tensor):
                entries[entry] = cut_entry(entry, value, parameters, ranks.pieces)
            elif _layout(value) != _layout(entries[entry]):
                raise CheckpointError(
                    f"checkpoint {found}, {entry_name(entry)}",
                    f"is a {_layout(value)} tensor, the model's is a {_layout(entries[entry])} one",
                    UNCHANGED,
                )
        if optimizer is not None:
            require_alike_groups(module, contents, optimizer, entries)

    def restore() -> None:
        try:
            for entry, value in read_entries(in_place, table, found):
                entries[entry].detach().copy_(value)
        except CheckpointError as error:
            remedy = "load another checkpoint, as a part of this one may have been loaded"
            raise CheckpointError(error.where, error.problem, remedy) from error
        _restore_extra_state(module, contents, model, entries)
        restore_random(entries.get(random), ranks.devices, ranks.layout)

    ranks.agree(verify)
    if optimizer is not None:  # first, for it may find that its state is none, and can be put back
        with _kept_where_refused(optimizer):
            ranks.agree(lambda: _restore_optimizer(module, contents, optimizer, entries, found))
    ranks.agree(restore)
    return dict(entries.get("extra") or {})


def _is_saved_here(entry: str, contents: Contents) -> bool:
    """Whether this rank saves ``entry``.

    Each tensor is saved by its owner. A module's extra state is saved by all ranks that have it; DCP writes
    only one of them.
    """
    kind, _, rest = entry.partition("/")
    name = rest.rpartition("/")[0] if kind == "state" else rest
    return name in contents.owned or (kind == "model" and name not in contents.first_name.values())


def _differences(model: Entries, table: Table) -> list[str]:
    problems = []
    for entry, value in model.items():
        name, saved = entry_name(entry), table.get(entry)
        if saved is None:
            problems.append(f"{name} is missing")
        elif isinstance(value, Tensor) != saved.is_tensor:
            problems.append(f"{name} is a tensor only in the module or only in the checkpoint")
        elif isinstance(value, Tensor) and tuple(saved.shape or ()) != tuple(value.shape):
            shapes = f"{tuple(saved.shape or ())}, the model's is {tuple(value.shape)}"
            problems.append(f"{name} has shape {shapes}")
        elif isinstance(value, Tensor) and not torch.can_cast(saved.torch_dtype, value.dtype):
            own = str(value.dtype).removeprefix("torch.")
            problems.append(f"{name} has dtype {saved.dtype}, the model's is {own}")
    return problems


def _optimizer_entries(
    module: nn.Module, contents: Contents, optimizer: Optimizer, table: Table
) -> tuple[list[str], list[str]]:
    """The saved entries of the optimizer's parameters, and a problem for each parameter without one."""
    wanted = {name for name, _ in parameter_names(module, contents, optimizer).values()}
    entries = []
    for entry in table:
        kind, _, rest = entry.partition("/")
        name = rest.rpartition("/")[0] if kind == "state" else rest
        if kind in ("state", "group") and name in wanted:
            entries.append(entry)
    missing = [n for n in sorted(wanted) if f"model/{n}" in table and f"group/{n}" not in table]
    return entries, [f"{n} was saved without an optimizer" for n in missing]


def _layout(tensor: Tensor) -> str:
    """How a tensor stores its elements; a copy into another layout fails or loses some of them."""
    if tensor.is_quantized:
        return "quantized"
    layout = str(tensor.layout).removeprefix("torch.")
    return f"{layout} meta" if tensor.is_meta else layout


@contextmanager
def _kept_where_refused(optimizer: Optimizer) -> Iterator[None]:
    """Give ``optimizer`` its old state back if the block raises."""
    before = optimizer.state, optimizer.param_groups
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise


def _restore_optimizer(
    module: nn.Module, contents: Contents, optimizer: Optimizer, entries: Entries, folder: Path
) -> None:
    """Like `restore_optimizer`; if the optimizer refuses the state, raises ``CheckpointError``."""
    try:
        restore_optimizer(module, contents, optimizer, entries)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {folder}",
            f"{type(optimizer).__name__} does not take the state in it ({type(error).__name__}: {error})",
            f"make the optimizer that was saved, or load with optimizer=None; {UNCHANGED}",
        ) from error


def _restore_extra_state(
    module: nn.Module, contents: Contents, model: Entries, entries: Entries
) -> None:
    """Load the extra state of modules: the entries of the model that are not tensors."""
    if all(isinstance(value, Tensor) for value in model.values()):
        return
    state = {
        name: entries[f"model/{contents.first_name.get(name, name)}"]
        for name in module_state(module)
    }
    nn.Module.load_state_dict(module, state)


def _kind(problem: str) -> str:
    """The words by which a problem is grouped with others of its kind.

    >>> _kind("fc.weight is not in the model"), _kind("fc.bias is missing")
    ('is not', 'is missing')
    """
    return " ".join(problem.split()[1:3])


def _refuse(path: Path, problems: list[str]) -> None:
    """Raise ``CheckpointError`` with the first few problems of each kind ("is missing", …)."""
    by_kind: dict[str, list[str]] = {}
    for problem in problems:
        by_kind.setdefault(_kind(problem), []).append(problem)
    lines = [line for _, alike in sorted(by_kind.items()) for line in first_few(alike, _SHOWN)]
    shown = "\n    ".join(lines)
    raise CheckpointError(
        f"checkpoint {path}",
        f"does not match the module and its optimizer:\n    {shown}",
        "load a checkpoint of this model; with optimizer=None only the weights are loaded",
    )
