"""The models of the tests of equality, captured when this is imported.

Processes that are forked after that have the captures, and torch has done for them what it does when
an operator first runs on tensors without data. No backward: with a GPU, autograd's threads start in
it, which no fork has.
"""

from __future__ import annotations

from distributed_cases import CASES, capture_case

for name in CASES:
    capture_case(name, 8)
