"""One module for each input format, with its reader."""
