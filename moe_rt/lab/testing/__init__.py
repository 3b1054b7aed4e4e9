"""Tools that benchmarks, GPU checks, fault trials and tests share: ranks to run things on, rounds of known results."""
