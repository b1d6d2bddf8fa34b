"""The words of the commands: each module turns the report of one or two commands into lines of text."""
