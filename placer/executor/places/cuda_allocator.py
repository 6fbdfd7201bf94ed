"""Configures torch's CUDA allocator as the plan assumes, if it has not allocated memory yet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

import torch

from placer._torch import given_allocator_settings, has_expandable_segments, set_expandable_segments
from placer.executor.places.place import Place
from placer.plan.types import Plan
from placer.quantities import format_bytes
from placer.versions import ALLOCATOR_VARIABLES


class AllocatorWarning(UserWarning):
    """torch's CUDA allocator is not configured as the plan assumes, and may need more memory."""


def prepare_allocator(plan: Plan, places: Iterable[Place]) -> None:
    """Turn expandable segments on if ``plan`` assumes them for a CUDA device among ``places``.

    Does not override what the user has set, by an environment variable or in the program, and changes
    nothing once the allocator has reserved memory. Asks torch afterwards whether segments are
    expandable, because some releases ignore a variable (pytorch#183387), and gives an
    ``AllocatorWarning`` if they are not.
    """
    wanted = {d.device: d for d in plan.devices if d.allocator == "expandable"}
    used = {p.name: p.device for p in places if p.device.type == "cuda" and p.name in wanted}
    if not used or has_expandable_segments():
        return
    given = [f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ]
    if not given and (settings := given_allocator_settings()):
        given = [f"the setting {settings}"]
    reserved = {name: torch.cuda.memory_reserved(device) for name, device in used.items()}
    if not given and not any(reserved.values()):
        set_expandable_segments()
        if has_expandable_segments():
            return
        why = "this platform does not support them"
    elif given:
        why = f"{', '.join(given)} is set"
    else:
        name, nbytes = max(reserved.items(), key=lambda item: item[1])
        why = f"{format_bytes(nbytes)} of {name} were already reserved"
    tightest = min((wanted[name] for name in used), key=lambda d: d.headroom or 0)
    left = "" if tightest.headroom is None else f", with {format_bytes(tightest.headroom)} to spare"
    warnings.warn(
        f"the plan assumes expandable segments ({format_bytes(tightest.needed)} on "
        f"{tightest.device}{left}), but torch's allocator does not use them: {why}. It may run out of "
        "memory although the plan fits. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before "
        'the first use of CUDA, or plan with "allocator": "default".',
        AllocatorWarning,
        stacklevel=3,
    )
