"""One run of a job, from lock to closing lines: start, recovery, coordination, retries and extensions."""
