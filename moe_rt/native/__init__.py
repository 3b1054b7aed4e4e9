"""The compiled engines behind the ops; everything that hands tensors to machine code is here."""
