"""Chooses what to recompute and what to offload in one stage, so that it fits at the least extra time.

`cheapest` chooses a policy, `search` extends partial policies block by block, and `types` defines policies
and limits.
"""
