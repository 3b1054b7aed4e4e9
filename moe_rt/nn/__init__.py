"""The layer: router, experts and what they are made of, as torch modules."""
