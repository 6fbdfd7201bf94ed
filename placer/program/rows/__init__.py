"""How inputs, results and values between them depend on the rows of the batch.

===========  ====================================================================
marks        `Whole` and `Batched` around arguments, which say how they are split
batch        which inputs have a row per sample, and along which dimension
axes         the dimensions that a function computes along
dependence   which values have a part per row, and what mixes rows
===========  ====================================================================
"""
