"""Makes a row's prompt: token ids from a column, a template, a conversation or a line of a batch file."""
