"""How fast vLLM serves over moe_rt, and how fast its requests end when a rank dies: `moe-rt bench --op serve`."""
