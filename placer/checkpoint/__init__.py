"""Saves and loads training state under the model's own names, so any placement can load any checkpoint.

``placer.save(module, optimizer, path)`` and ``placer.load(module, optimizer, path)`` work with a placed
module in one process, with one in a job of many processes (all ranks call them), and with a plain
``nn.Module``; each can load what another has saved. A checkpoint is a folder in the format of
``torch.distributed.checkpoint``, and its ``format_utils`` can read it. In addition ``contents.json`` has
the position and the checksum of each entry. ``placer.load`` reads this table, and no pickle that could
run code.
"""

from placer.checkpoint.checkpoint import load, save
