"""The commands that inspect or compare jobs: `status`, `head`, `check`, `validate`, `diff` and `verify`."""
