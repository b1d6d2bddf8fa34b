"""The tasks. Each turns a prompt into requests, and their results into output columns."""
