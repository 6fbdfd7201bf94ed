"""One process per device: speed and memory against DDP and pipelining by hand."""
