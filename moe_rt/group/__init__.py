"""Groups of ranks: their members, their rendezvous, and which members have exited."""
