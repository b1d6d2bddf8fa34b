"""The order in which rows run: shards, stored selections and permutations, and the predicates that choose rows.

Pure decisions and their files. Who runs a shard is decided in `fleet`.
"""
