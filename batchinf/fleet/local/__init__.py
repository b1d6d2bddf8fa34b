"""The backend of one host: replicas are process groups, messages go over socket pairs, NVML tells of the devices."""
