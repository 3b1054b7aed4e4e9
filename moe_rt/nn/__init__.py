"""The layer: router, experts and their parts, as torch modules."""
