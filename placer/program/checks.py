"""What a capture refuses: models, arguments, and what forward stores."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from placer._torch import global_hooks, is_compiled
from placer.errors import CaptureError
from placer.program.call import BoundCall, placeholder_names
from placer.program.fake.packed import packed_places
from placer.program.objects.paths import hidden_modules, spell, walk
from placer.program.objects.restore import Change
from placer.program.rows.batch import SplitRules


def _not_a_module(found: object) -> CaptureError:
    name = getattr(found, "__name__", "")
    if callable(found) and name.isidentifier():
        kind = "class" if isinstance(found, type) else "function"
        problem = f"is the {kind} {name!r}, not a torch.nn.Module"
        return CaptureError("model", problem, f"call it: {name}()")
    problem = f"is a {type(found).__name__}, not a torch.nn.Module"
    return CaptureError("model", problem, "pass a module")


def check_model(model: nn.Module) -> None:
    """Raise ``CaptureError`` if ``model`` is no module, or one that hides what it computes."""
    if not isinstance(model, nn.Module):
        raise _not_a_module(model)
    refuse_global_hooks()
    hidden = ((spell(path), module) for path, module in hidden_modules(model).items())
    for path, module in (*model.named_modules(), *hidden):
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                path or "the model",
                "is TorchScript, whose tensors cannot be replaced by ones without data",
                "use the Python module that it was made from",
            )
        if is_compiled(module):
            name = path or "model"
            raise CaptureError(
                path or "the model",
                "is compiled already (torch.compile), which hides its layers",
                f"pass the module that was compiled: {name}._orig_mod instead of {name}",
            )
        for name, value in (
            *vars(module).items(),
            *module._parameters.items(),
            *module._buffers.items(),
        ):
            if isinstance(value, Tensor):
                _refuse_compressed(f"{path}.{name}".lstrip("."), value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                name,
                "is not initialized yet, so the model's shapes are unknown (a lazy module)",
                "run the model once on a small input before you hand it to placer",
            )


def refuse_global_hooks() -> None:
    """Raise ``CaptureError`` for hooks of all modules, except torch's own, as those that count FLOPs."""
    for hook in global_hooks():
        if not (getattr(hook, "__module__", None) or "").startswith("torch."):
            raise CaptureError(
                getattr(hook, "__qualname__", repr(hook)),
                "is a hook of all modules, and a placed model does not call those whose layers it runs",
                "put it on the modules that it is for, such as by module.register_forward_hook, or remove "
                "it for calls of the placed model",
            )


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _refuse_compressed(name: str, tensor: Tensor) -> None:
    """Raise ``CaptureError`` for a sparse tensor in a layout that torch cannot copy."""
    if tensor.layout in _COMPRESSED:
        problem = f"is a sparse tensor in the layout {tensor.layout}, which torch cannot copy"
        raise CaptureError(name, problem, "use the layout torch.sparse_coo: x.to_sparse_coo()")


def check_arguments(bound: BoundCall) -> None:
    """Raise ``CaptureError`` for an argument that another call would have to give again.

    Also for a sparse tensor in a layout that is not supported.
    """
    for name, tensor in zip(placeholder_names(bound), bound.tensors, strict=True):
        _refuse_compressed(name, tensor)
    for name, leaf in zip(bound.leaf_names, bound.leaves, strict=True):
        if hasattr(type(leaf), "__next__"):
            problem = "is an iterator, which forward may advance, and a recorded program would not"
            raise CaptureError(name, problem, "pass what it gives (next(…)), or a list")
        if (
            is_dataclass(leaf)
            and not isinstance(leaf, type)
            and any(isinstance(x, Tensor) for _, x in walk([((), leaf)]))
        ):
            kind = type(leaf).__qualname__
            raise CaptureError(
                name,
                f"is a dataclass with tensors ({kind}) into which placer does not look, so that every call "
                "would have to pass this very object",
                f"register its class before: torch.utils._pytree.register_dataclass({kind}); or pass its "
                "tensors and values in a tuple, list, dict or named tuple",
            )


def whole_if_packed(rules: SplitRules, bound: BoundCall) -> SplitRules:
    """``rules``, and that the tensors of packed sequences among the arguments are not split.

    Raises ``CaptureError`` if the batch is to be split.
    """
    places = list(packed_places(bound.in_spec))
    if places and rules.is_split:
        raise CaptureError(
            f"input {bound.leaf_names[places[0]].rpartition('.')[0]}",
            "is a packed sequence, which cannot be split into slices of the batch",
            "use 1 replica and 1 micro-batch; or pass padded sequences and their lengths, and pack them in "
            "forward",
        )
    tensors = len(PackedSequence._fields)
    names = {name: None for i in places for name in bound.leaf_names[i : i + tensors]}
    return replace(rules, names={**rules.names, **names})


def unknown_store(name: str) -> CaptureError:
    """The error for a stored value of which slices do not tell that of the batch."""
    pattern = re.sub(r"\.\d+(?=\.)", ".*", name)  # also those of the other layers of a list
    return CaptureError(
        name,
        "is stored by forward and has no row per sample, and it is not known how that of the batch follows "
        "from those of its slices",
        f'say it in the spec: "stored": {{"{pattern}": "mean"}}, "sum" or "concatenate"; or use 1 replica '
        "and 1 micro-batch",
    )


def store_of_backward(change: Change) -> CaptureError:
    """The error for a value that code in the backward stores, once for every slice."""
    return CaptureError(
        spell(change.path),
        "is set in the backward, by a hook or an autograd function, which runs for every slice of the batch",
        "use 1 replica and 1 micro-batch; or put the hook on a parameter, where it gets the gradient of the "
        "whole batch",
    )


def store_of_whole(change: Change) -> CaptureError:
    """The error for a value that a single node stores, once for every slice."""
    return CaptureError(
        spell(change.path),
        "is set by a module that stays whole, or by its hook, which would run for every slice of the batch",
        "use 1 replica and 1 micro-batch, or return the value",
    )
