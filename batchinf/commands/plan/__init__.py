"""`batchinf plan`: what fits where, and how long it takes."""
