"""Plan: a spec and a captured model in, the lock file of the placement out.

=====================  ===========================================================================
build                  makes a plan: `resolve` says what the spec asks of this model, `devices` what
                       memory there is, `lighten` searches, `assemble` puts together, with `notes`
auto, remedies         the fewest devices that suffice; what would make a plan fit that does not
types, format, store   the plan, its file, saving and loading
check, follow          does a plan belong to a model; where do nodes of another program of it go
pieces                 what a model can be cut into, and how many devices that takes at the least
explain                why each boundary is where it is, in words
=====================  ===========================================================================
"""
