"""What ranks sum or average: gradients, losses, buffers, statistics of norms."""
