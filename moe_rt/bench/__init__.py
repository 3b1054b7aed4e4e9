"""The benchmark: contestants move the same tokens on the same ranks in the same run; docs/benchmarks.md has the rules."""
