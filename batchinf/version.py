"""The version of this package. `batchinf.__version__` is the same."""

__version__ = "0.1.0"
