"""Run a model once on fake tensors, and write down what it computes.

================================  =======================================================================
record                            start reading here: one recording
forward, leaving, watched,        one run of forward, with what it leaves behind
new_names
recorder, watch, size_recorder    intercept functions of torch, calls of modules, arithmetic on sizes
writer, operand_order             write the graph
single_node, encoder              modules that become a node; torch's ``TransformerEncoder``
reached, inside, readings,        what runs inside such a node, or in the backward, and whether it mixes rows
backward
validation                        checks of ``torch.distributions``
================================  =======================================================================
"""
