"""The rows of the replicas: which leases each is given, how much its engine takes, and which rows kill engines."""
