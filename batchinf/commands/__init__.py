"""The commands that run no engine: one module for each, from `init` and `validate` to `diff` and `verify`."""
