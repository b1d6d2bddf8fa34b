"""The order in which rows run: shards, stored files of positions, and the predicates that choose rows.

Pure decisions and their files. Who runs a shard is decided in `fleet`.
"""
