"""Failures of a rank: finds the stage and layer, tells the other ranks, and finds ranks that hang."""
