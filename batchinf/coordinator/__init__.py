"""One run of a job, from the lock to the closing lines: start, recovery, coordination, retries and extensions."""
