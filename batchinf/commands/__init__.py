"""The commands that look at a job or compare it: `status`, `head`, `check`, `validate`, `diff` and `verify`."""
