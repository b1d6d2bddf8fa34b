"""The commands that look at a job or compare it: `status`, `check`, `validate`, `diff` and `verify`."""
