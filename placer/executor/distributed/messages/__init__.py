"""A rank's own part of a step: its rows, its stages, and what it sends to other ranks and receives."""
