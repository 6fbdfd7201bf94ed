"""One process per device: speed against DDP and pipelining by hand."""
