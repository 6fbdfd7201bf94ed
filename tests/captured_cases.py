"""The models of the tests of equality, captured when this is imported.

Processes that are forked after that have the captures, and torch has done for them what it does when
an operator first runs on tensors without data. No backward: with a GPU, autograd's threads start in
it, which no fork has.
"""

from __future__ import annotations

from checkpoint_cases import capture_plain
from distributed_cases import CASES, capture_case

for name in CASES.keys() - {"resnet18"}:  # that takes long, and few tests use it
    capture_case(name, 8)
for seed in (0, 1):
    for train in (False, True):
        capture_plain(seed, train=train)
