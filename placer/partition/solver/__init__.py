"""Partitions of a graph onto a chain of stages; knows nothing of models.

A placement assigns the units of a directed acyclic graph to stages so that no edge goes back to an
earlier stage. The units of the first q stages are then a downset: a set of units that includes all their
predecessors. The boundary after a stage is the downset of that stage and all stages before it.

========  ===========================================================================
problem   the problem: units, values that cross boundaries, costs, memory limits
solve     the entry point, which uses these in turn:
lattice   units in a topological order, downsets as bitsets
families  a family of downsets, from a few orders and a beam search
program   the best placement whose boundaries are in a family, by dynamic programming
search    the best placement of all families
interval  for more than 1,500 units: stages along one order
========  ===========================================================================

`benchmarks.msr.proof` finds the best placement of all, by the program over every downset that could matter.
"""
