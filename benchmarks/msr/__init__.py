"""Published placement workloads (Tarnawski et al., NeurIPS 2020) through placer's partitioner."""
