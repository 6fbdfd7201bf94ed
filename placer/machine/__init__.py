"""What models run on: kinds of devices, how fast they are, and the links between them.

=====================  ===========================================================================
rates                  how long an operation takes, from a few numbers per class of operations
h100                   such numbers, measured
catalogue              the kinds of devices that placer knows, from their data sheets
kindfile               a kind that was measured, in a file
devices                the kind of a device of a spec
=====================  ===========================================================================
"""
