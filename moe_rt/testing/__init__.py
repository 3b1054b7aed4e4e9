"""What benchmarks, GPU checks, fault trials and tests share: ranks to run things on, and rounds of known results."""
