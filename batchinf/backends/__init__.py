"""Where replicas run: one file a backend, all with the interface of `local`."""
