"""The commands' output as text. Each module turns the report of one or two commands into lines."""
