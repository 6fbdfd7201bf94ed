"""Reductions over ranks: gradients, losses, buffers, and the statistics of norms."""
