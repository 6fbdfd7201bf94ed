"""Checkpoints by the model's own names: what one placement saves, any other loads.

``placer.save(module, optimizer, path)`` and ``placer.load(module, optimizer, path)`` work on a
placed module in one process, on one that is spread over a job of many (all ranks call them), and on
a plain ``nn.Module``, each with the checkpoints of the others. A checkpoint is a folder in the
format of ``torch.distributed.checkpoint``; besides it ``torch.distributed.checkpoint.format_utils``
reads it.
"""

from placer.runtime.checkpoint.checkpoint import load, save

__all__ = ["load", "save"]
