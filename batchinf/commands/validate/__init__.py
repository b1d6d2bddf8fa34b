"""`batchinf validate`: its checks, its report, and the rows that it shows."""
