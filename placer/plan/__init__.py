"""Plan: the lock file of a placement, below all that makes plans and all that runs them.

=====================  ===========================================================================
types                  what a plan says: stages, devices, transfers, and how good they are
store, problems        saving and loading it as JSON; what is wrong with a file, in words
check                  does a plan belong to a model; does it fit
explain, summary       why each boundary is where it is; the plan in a few lines
=====================  ===========================================================================
"""
