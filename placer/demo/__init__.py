"""The demo (``placer demo``): plan a real brain volume, train on several devices, and check the results."""
