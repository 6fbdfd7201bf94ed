"""Operators that look at neighbours in space, run on a part of their output at a time.

``windows`` says which planes of its input a part of the output reads (integers only); ``chunked`` runs a
convolution in chunks of planes; ``chunks`` is the rewrite that puts such convolutions into a program.
"""

from placer.space.chunks import MOST_CHUNKS, chunk_rewrites, count_chunked, find_joins

__all__ = ["MOST_CHUNKS", "chunk_rewrites", "count_chunked", "find_joins"]
