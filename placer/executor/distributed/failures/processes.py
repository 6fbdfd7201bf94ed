"""Whether a process of this machine is still running: a killed one cannot tell the others that it ends."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED_STATES = ("Z", "X")  # a process that has ended but whose parent has not read its exit status


def process_identity() -> str:
    """A name for this process that no other process has; "" on systems without ``/proc``."""
    try:
        started = _state_and_start(os.getpid())[1]
        return f"{_namespace()} {os.getpid()} {started}"
    except (OSError, ValueError, IndexError):
        return ""


def has_ended(identity: str) -> bool:
    """Whether the process with this `process_identity` has ended.

    False if that is not known: it runs on another machine, or in another container.
    """
    namespace, _, process = identity.partition(" ")
    try:
        if not identity or namespace != _namespace():
            return False
        number, started = process.split()
        if not Path(f"/proc/{number}").exists():
            return True
        state, now_started = _state_and_start(int(number))
    except (OSError, ValueError, IndexError):
        return False
    return state in _ENDED_STATES or now_started != started


def _namespace() -> str:
    """The machine since its last start, and the container, within which process numbers are unique."""
    return f"{_BOOT_ID.read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"


def _state_and_start(number: int) -> tuple[str, str]:
    """The state of a process, and its start in clock ticks since the machine started (``man 5 proc``)."""
    text = Path(f"/proc/{number}/stat").read_text()
    fields = text[text.rindex(")") + 1 :].split()  # the name before it may have spaces
    return fields[0], fields[19]
