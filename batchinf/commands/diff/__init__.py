"""`batchinf diff`: joins the rows of two jobs and counts what changed between them."""
