"""Chooses what to recompute and offload in one stage, so that it fits its memory in the least time.

`cheapest` chooses a policy, `least` computes a lower bound on the time of any policy, `search` extends
partial policies block by block, and `types` defines policies and limits.
"""
