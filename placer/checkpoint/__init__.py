"""Checkpoints by the model's own names: what one placement saves, any other loads.

``placer.save(module, optimizer, path)`` and ``placer.load(module, optimizer, path)`` work on a
placed module in one process, on one that is spread over a job of many (all ranks call them), and on
a plain ``nn.Module``, each with the checkpoints of the others. A checkpoint is a folder in the format
of ``torch.distributed.checkpoint``, whose ``format_utils`` read it too. Its ``contents.json`` says
where each entry is and what its checksum is; ``placer.load`` reads this table, and no pickle that
could run code.
"""

from placer.checkpoint.checkpoint import load, save, upgrade

__all__ = ["load", "save", "upgrade"]
