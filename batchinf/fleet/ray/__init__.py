"""The Ray backend: each replica is an actor in a placement group, on any node of a Ray cluster."""
