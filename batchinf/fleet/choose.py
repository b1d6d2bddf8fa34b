"""Chooses the backend that runs a job's replicas; the one module that names a backend."""

from batchinf.fleet.backend import Backend
from batchinf.fleet.local.backend import LocalBackend


def choose_backend() -> Backend:
    """The backend for jobs that are started here: this host's."""
    return LocalBackend()
