"""All replicas of a job: devices, starting and ending them, which shards each gets, and what to do when one dies."""
