"""The plan of a placement: its types, its JSON file, and what can be derived from it alone.

=====================  ===========================================================================
types                  a plan's fields: stages, devices, transfers, and how good they are
store, problems        save and load a plan as JSON; describe what is wrong with a file
check                  check that a plan belongs to a model, and that it fits
step_spans             lay out a step in time
explain, summary       explain why each stage ends where it does; describe a plan in a few lines
=====================  ===========================================================================
"""
