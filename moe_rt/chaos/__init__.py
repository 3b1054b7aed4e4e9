"""moe-rt chaos: ranks die, stop, sleep, fail and lie at random points, and every survivor must notice at once."""
