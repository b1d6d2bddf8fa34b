"""Which rows run, in which order, and on which replica: positions, predicates, shards, leases."""
