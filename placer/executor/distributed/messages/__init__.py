"""A rank's part of a step: its rows, its stages, and the messages to and from other ranks."""
