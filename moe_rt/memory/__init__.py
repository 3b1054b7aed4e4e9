"""Symmetric memory: one module for each heap."""
