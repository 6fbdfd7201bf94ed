"""Demo: a real brain volume planned, split over devices, trained and checked; ``placer demo``."""
