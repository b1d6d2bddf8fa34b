"""`batchinf verify`: runs a sample of a job's rows through transformers and compares the stored numbers."""
