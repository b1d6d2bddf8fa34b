"""One replica: the process around an engine, its feeder, worker and writer threads, and its messages."""
