"""The tasks: how each makes requests of a prompt, and which output columns it makes of their results."""
