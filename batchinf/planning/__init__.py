"""Computes what a job will need, before it runs: devices, degrees, time. It starts nothing and needs no device."""
