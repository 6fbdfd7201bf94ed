"""Settings of all tests: one thread per process, and no failures because a test is slow."""

import os

from hypothesis import settings

# Before torch is imported; child processes have it too. Some test processes share two cores, where
# torch's own threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("placer", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("placer")
