"""Splits a program in space: every shard of a stage has a part of each value.

=========================  =========================================================================
layout                     which part of a value each shard has, and pieces of others (integers only)
windows, operators         which input a part of an operator's output reads, and how it is run
exchange                   what moves pieces between shards, and sums over them
windowed, norms, whole     the differentiable operations over shards; so are reductions
nodes                      the same as what stands in a graph
call, rules, window_rules  what a rule is given and says; which operations can be cut, and how
taking                     the rules for slices, padding, and dimensions that come or go
inputs, rewrite            how inputs are cut; the pass from a program to one of parts
queries                    what such a program has: parts, windows, gathers
chunks                     convolutions of a concatenation in chunks of planes, on one device
=========================  =========================================================================
"""

from placer.space.chunks import CONVOLUTIONS, MOST_CHUNKS, count_chunked, find_joins
from placer.space.exchange import Alone, Exchange, Pieces, exchanging, innermost_exchange
from placer.space.layout import Cuts, Layout
from placer.space.nodes import CutWhole, GatherParts, InSpace
from placer.space.norms import track
from placer.space.queries import (
    count_windows,
    cut_inputs,
    cuts_of,
    find_gathered,
    nodes_in_space,
    own_parts,
    parts_in,
    similar_shards,
)
from placer.space.rewrite import spec_rewrites
