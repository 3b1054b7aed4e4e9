"""Planning of expert parallelism: bytes, memory, time, overflow and the choice of a configuration, before any run."""
