"""Partition problems, free of models: the answer, and a lower bound that no placement beats.

Begin with `problem`, the question, and `solve`, which takes the steps below in turn.

=====================  ===========================================================================
reduce                 units that depend on each other both ways become one
lattice                units in a topological order, downsets as bitsets
search                 first answers and proofs for one problem, by
program                the dynamic program over a family of downsets, from
families, surviving    a beam first, then all that a better answer may use, which is the proof;
                       `conditions` say which may be borders, `work` how long it may take
interval, windows      large graphs: stages along one order, and better borders for them
moves                  tight budgets: units move one by one
=====================  ===========================================================================
"""
