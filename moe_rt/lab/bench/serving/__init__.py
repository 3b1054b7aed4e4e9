"""Benchmark of vLLM over moe_rt: serving speed, and how fast requests end when a rank dies (`moe-rt bench --op
serve`)."""
