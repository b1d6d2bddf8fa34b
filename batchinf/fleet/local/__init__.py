"""The backend of one host: replicas are process groups, messages use socket pairs, and NVML describes the devices."""
