"""`batchinf report`: one HTML file about a job, made from its files alone."""
