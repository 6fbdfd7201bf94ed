"""What all tests share: one thread per process."""

import os

# Before torch is imported; child processes have it too. Some test processes share two cores, where
# torch's own threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
