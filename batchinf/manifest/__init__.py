"""The manifest: the job's durable record of what it is and what is done, its lock, and the names of its files."""
