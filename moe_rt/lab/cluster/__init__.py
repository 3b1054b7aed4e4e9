"""Emulated cluster nodes on one machine, as Linux namespaces, to rehearse and test multi-host behaviour on one host."""
