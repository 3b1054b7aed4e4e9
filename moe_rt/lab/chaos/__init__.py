"""moe-rt chaos: kill, stop, delay and corrupt ranks at random points. Every survivor must notice promptly."""
