"""What to recompute and what to offload in one stage, so that it fits its memory in the least time.

`cheapest` chooses a policy, `least` bounds the time of any policy from below, `search` extends partial
policies block by block, `types` has the words.
"""
