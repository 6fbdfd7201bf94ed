"""Planner: a spec and a captured model in, a plan out.

=====================  ===========================================================================
build                  makes a plan: `resolve` says what the spec asks of this model, `devices` what
                       memory there is, `activation_policy` searches, `assemble` puts together, with
                       `notes`
auto, remedies         the fewest devices that suffice; what would make a plan fit that does not
follow                 where the nodes of another program of the same model go
cut_limits             what a model can be cut into, and how many devices that takes at the least
=====================  ===========================================================================
"""
