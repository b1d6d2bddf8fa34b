"""`batchinf init`: templates of specs, filled with the columns of the user's data."""
