"""Chooses the backend that runs a job's replicas. Only this module names a backend."""

from batchinf.fleet.backend import Backend
from batchinf.fleet.local.backend import LocalBackend


def choose_backend() -> Backend:
    return LocalBackend()
