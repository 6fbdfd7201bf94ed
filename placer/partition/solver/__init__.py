"""Partition problems, free of models: the answer, and a lower bound that no placement beats.

Begin with `problem`, the question, and `solve`, which takes the steps below in turn.

=====================  ===========================================================================
reduce                 the same problem with fewer units
lattice                units in a topological order, downsets as bitsets
program                the dynamic program over a family of downsets, from
families, surviving    a beam first, then all that a better answer may use, which is the proof;
                       `conditions` say which may be borders, `work` how long it may take
floats, float_costs    units without edges, which are placed last; `branch` proves where
interval, windows      large graphs: stages along one order, and better borders for them
moves                  tight budgets: units move one by one
=====================  ===========================================================================
"""
