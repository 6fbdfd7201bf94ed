"""What a ledger has counted."""

from __future__ import annotations

from collections import Counter

from placer.simulation import Ledger


def live_bytes(ledger: Ledger) -> dict[str, int]:
    """The bytes on each device that are not freed yet."""
    found = Counter[str]()
    for block in ledger.timeline().kept().values():
        found[block.device] += block.nbytes
    return dict(found)
