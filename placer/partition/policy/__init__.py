"""What to recompute and what to offload in one stage, so that it fits at the least extra time.

`cheapest` chooses; `labels` are partial choices and how they go on; `least` is what any choice costs
at the least.
"""
