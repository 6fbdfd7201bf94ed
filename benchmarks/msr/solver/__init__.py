"""placer's partition solver, extended to graphs that have operations without edges.

Their graphs have units without edges ("isolated units": backward nodes of no colour class), which may be
on any stage, and units that no stage is ever better off without. Variants of them have memory limits so
tight that few placements keep them. In a captured model nothing of this changes a plan.

=====================  ===========================================================================
solve                  `placer.partition.solve` for these problems: begin here
folds, reduce          units that some best placement has beside their only neighbour, or that are on a
                       cycle, become one
lattice, conditions    isolated units left out of the downsets, and what they cost a boundary at least
costs                  what they cost a stage at least; `assign` puts them on stages afterwards
branch, pairs          which stages they are on, proven by branch and bound
limits, moves          tight memory limits: less memory first, then units move one by one
=====================  ===========================================================================
"""
