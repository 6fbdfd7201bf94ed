"""Reads single tensors of a checkpoint file without loading the whole file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from placer.errors import PlacerError, path_remedy

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # usual suffixes of weights files


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """An open checkpoint: the shape of every tensor, and a function to read one to the CPU."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    """Open the checkpoint at ``path``: ``*.safetensors``, or a file of ``torch.save``, memory-mapped.

    Only tensors are read (``weights_only``), so no code in the file runs. Raises ``PlacerError`` if
    the file does not exist or is not a state dict.
    """
    if not path.is_file():
        hint = path_remedy(path, lambda beside: beside.suffix in _SUFFIXES)
        raise PlacerError(f"weights {path}", "no such file", hint)
    if path.suffix == ".safetensors":
        try:
            handle = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise PlacerError(f"weights {path}", f"not a safetensors file: {error}") from error
        with handle as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            yield WeightsFile(shapes=shapes, read=file.get_tensor)
        return
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise PlacerError(
            f"weights {path}",
            f"cannot be read as a state dict: {str(error).splitlines()[0]}",
            "save it with torch.save(model.state_dict(), path) or with safetensors",
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise PlacerError(
            f"weights {path}",
            "the file is not a plain state dict (name -> tensor)",
            "save model.state_dict() alone",
        )
    yield WeightsFile(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()}, read=state.__getitem__
    )
