"""Commands that measure, check and break moe_rt. The runtime imports nothing from here."""
