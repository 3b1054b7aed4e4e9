"""moe-rt gpucheck: whether everything works on this machine's GPU, and how fast; each file says which part it is."""
