"""Searches for the best way to train a model on given devices.

=====================  ===========================================================================
strategy               a point of the search: degrees of parallelism, and what saves memory
candidates             lists the strategies that a spec and its devices allow
bounds                 the least seconds and bytes of a strategy, from sums
search                 estimates the best of each family, judges the best by dry runs, and chooses
answer                 says how good the chosen one is, and why each other one lost
remedies               finds changes that make a plan fit which does not
=====================  ===========================================================================
"""
