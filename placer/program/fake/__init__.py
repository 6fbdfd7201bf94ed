"""What stands for tensors and numbers while a model runs without its data.

==============  ====================================================================
converter       fake copies of tensors and modules
mode, shapes    a fake mode and shape rules that are faster than torch's
sizes           integers and floats that know which node of the graph computes them
packed          packed sequences, whose lengths are assumed
caches          cached functions of the model's code, which a run must not fill
row_gradients   sparse gradients of embeddings
==============  ====================================================================
"""
