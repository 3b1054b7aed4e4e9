"""What experts compute, over real rows only, on each kind of device."""
