"""Makes a plan from a spec and a captured model.

=====================  ===========================================================================
build                  makes a plan: `resolve` applies the spec to the model, `devices` finds the
                       memory of devices, `activation_policy` searches, `host_memory` counts the
                       host's bytes, `assemble` builds the `Plan`, `notes` its notes, and
                       `unknown_times` takes out times that nobody knows
follow                 assigns the nodes of another program of the same model to a plan's stages
cut_limits             finds how far a model can be split, and how many devices it needs at least
=====================  ===========================================================================
"""

import placer.space
