"""What all tests share: one thread per process, and what the installed torch cannot do is skipped."""

import os

# Before torch is imported; child processes have it too. Some test processes share two cores, where
# torch's own threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``needs(feature)`` where the installed torch does not have the feature."""
    from placer._torch import missing_names
    from placer.versions import found_release

    for item in items:
        for marker in item.iter_markers("needs"):
            (feature,) = marker.args
            if missing_names(feature):
                reason = f"torch {found_release('torch')} cannot run {feature}"
                item.add_marker(pytest.mark.skip(reason=reason))
