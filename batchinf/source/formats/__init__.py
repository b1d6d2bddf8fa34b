"""One module for each input format, with its scan and its reader; `registry` lists them."""
