"""Optimizer state that is sharded over ranks: whole in a checkpoint, in pieces in the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from placer.checkpoint.entries import Entries, parameter_names
from placer.checkpoint.group import CheckpointGroup
from placer.executor.distributed.reduction.pieces import Pieces


def gather_state(module: nn.Module, optimizer: Optimizer, ranks: CheckpointGroup) -> Entries:
    """The whole state of parameters that are updated in pieces, on the CPU; all ranks call this together.

    The ranks that have a parameter keep one tensor after the other in turn, so that none has more than its
    share of them.
    """
    pieces, named = ranks.pieces, parameter_names(module, ranks.contents, optimizer)
    shared = {named[key][0]: s for key, s in pieces.shared.items() if key in named}
    # For each entry a piece's dtype, or a value that is no piece
    mine: dict[str, dict[str, Any]] = {}
    for name, each in shared.items():
        pieces.cut_state(each.parameter, optimizer.state)
        state = optimizer.state.get(each.parameter, {})
        mine[name] = {
            key: value.dtype if pieces.is_piece(each.parameter, value) else value
            for key, value in state.items()
        }
    known: dict[str, dict[str, Any]] = {}
    for rank in ranks.gather(mine):
        for name, state in rank.items():
            known.setdefault(name, {}).update(state)
    found: Entries = {}
    turns = Counter[tuple[int, ...]]()  # by the devices of a group
    for name, each in shared.items():
        # Of several groups that divide the state, the first one's ranks keep it.
        keeps = turns[each.holders] % each.sharing.size == each.group.rank
        turns[each.holders] += 1
        for key, value in sorted(known[name].items()):
            whole = value
            if isinstance(value, torch.dtype):
                own = optimizer.state.get(each.parameter, {}).get(key)
                if own is None:
                    own = torch.empty(0, dtype=value, device=each.parameter.device)
                whole = pieces.gather(each.parameter, own)
            if keeps:
                found[f"state/{name}/{key}"] = whole.cpu() if isinstance(whole, Tensor) else whole
    return found


def cut_entry(entry: str, value: Any, parameters: Mapping[str, Tensor], pieces: Pieces) -> Any:
    """What this rank's optimizer keeps of the ``value`` of an entry, given its parameters by name."""
    kind, _, rest = entry.partition("/")
    parameter = parameters.get(rest.rpartition("/")[0])
    return value if kind != "state" or parameter is None else pieces.cut(parameter, value)
