"""Symmetric memory: a heap gives every rank the address of every rank's segment, and nothing else."""
