"""Exact and heuristic partitions of a graph onto a chain of stages; knows nothing of models.

A placement puts the units of a directed acyclic graph on stages so that no edge goes back. The first
q stages then have a downset: a set of units with all their predecessors. The boundary after a stage
is the downset that the stage and those before it have together.

=====================  ===========================================================================
problem                what is asked: units, values that cross boundaries, costs, memory limits
solve                  the entry point, which takes these steps in turn:
lattice                units in a topological order, downsets as bitsets
families               a first family of downsets: those of a few orders, and of a beam search
program                the best placement whose boundaries are in a family: dynamic programming
search                 a first answer, then a proof: the program over all downsets that could matter
conditions, surviving  which downsets these are, and how they are enumerated
work                   a count of operations that limits a proof, so that no clock decides
interval               more than 1,500 units: stages along one order
=====================  ===========================================================================
"""
