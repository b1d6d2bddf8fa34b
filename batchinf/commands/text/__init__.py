"""The words of the commands: a module turns one command's report into lines, and `as_json` any report into JSON."""
