"""One thread per test process: some of them share two cores, and torch's own threads would wait."""

import os

# Before torch is imported; child processes have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
