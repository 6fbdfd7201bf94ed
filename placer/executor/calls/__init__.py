"""Finds the program for a call of a placed module, and captures the model for new kinds of calls.

===================  ==========================================================================
call_cache           programs by the arguments of a call
program_cache        programs by modes and sizes, with their stages
numbers              numbers that are others in every call, and become inputs
state                tensors and numbers that calls keep
===================  ==========================================================================
"""
