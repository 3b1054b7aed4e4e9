"""torch ops of dispatch and combine: schemas, derivatives, compilation, references, and the experts' kernels."""
