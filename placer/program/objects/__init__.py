"""What a model and its code hold, and how it is searched, copied and restored.

=====================  ======================================================================
paths                  the items of containers and attributes of objects, and their paths
reachable              cached functions, variables and containers that the model's code can reach
restore                snapshots: find and undo what a forward changed
copying, originals     copies of modules, and which part of the model each part is a copy of
hook_table             hooks of a copy, which follow handles that remove those of the model
python_random          random numbers of Python and numpy
=====================  ======================================================================
"""
