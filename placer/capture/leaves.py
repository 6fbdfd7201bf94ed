"""Which modules are one node of the graph by nature, or must be before anything is recorded."""

from __future__ import annotations

import torch
from torch import nn

# Containers of torch.nn with layers inside: they are looked into.
_CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_torch_leaf(module: nn.Module) -> bool:
    """Is ``module`` a layer of ``torch.nn``, which is one node of the graph?"""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(
        module, _CONTAINERS
    )


def find_whole_modules(model: nn.Module) -> dict[str, str]:
    """Submodules that must stay whole: path -> the reason in a sentence."""
    whole: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or is_torch_leaf(module):
            continue
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            whole[path] = "it has hooks, which must run around the whole module"
        elif nn.utils.parametrize.is_parametrized(module):
            whole[path] = "it has parametrized parameters, which must be computed inside it"
        elif isinstance(module, torch.jit.ScriptModule):
            whole[path] = "it is TorchScript, which runs outside Python"
    return whole
