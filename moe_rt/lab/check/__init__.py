"""moe-rt gpucheck: correctness and speed of moe_rt on this machine's GPU. Each file is one part."""
