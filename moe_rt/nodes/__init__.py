"""Nodes of a cluster on one machine, as Linux namespaces: what several hosts do can be rehearsed and tested on one."""
