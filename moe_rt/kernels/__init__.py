"""Computations of the experts, over real rows only, for each kind of device."""
