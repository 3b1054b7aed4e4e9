"""The compiled engines that run the ops, and all code that hands tensors to machine code."""
