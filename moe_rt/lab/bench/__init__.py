"""The benchmark: contestants move the same tokens on the same ranks in one run. docs/benchmarks.md states the rules."""
