"""CUDA toolchain of the GPU engine: driver, just-in-time compiler, cubins, launches."""
