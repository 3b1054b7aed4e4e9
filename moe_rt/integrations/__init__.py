"""Other libraries' models on moe_rt: each module is imported by hand, and needs the library it is named for."""
