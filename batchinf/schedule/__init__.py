"""Which rows run, in which order, and on which replica: positions, predicates, shards, leases.

Pure decisions and their files. `fleet` carries out what `leases.py` decides.
"""
