"""Partition problems, free of models: the answer, and a lower bound that no placement beats.

Begin with `problem`, the question, and `solve`, which takes the steps below in turn.

=====================  ===========================================================================
reduce                 the same problem with fewer units
lattice                units in a topological order, downsets as bitsets
families, program      the dynamic program over families of downsets: a beam first, then all that
                       a better answer may use, which is the proof
floats, float_costs    units without edges, which are placed last; `branch` proves where
interval, windows      large graphs: stages along one order, and better borders for them
moves                  tight budgets: units move one by one
=====================  ===========================================================================
"""
