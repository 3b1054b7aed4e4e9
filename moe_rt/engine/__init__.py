"""Engines that run ops: CPU ranks and GPUs."""
