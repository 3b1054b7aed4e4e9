"""Interfaces of other libraries over moe_rt, for programs that are written against them."""
