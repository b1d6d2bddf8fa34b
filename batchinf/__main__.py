"""`python -m batchinf` is the console script `batchinf`."""

from batchinf.cli import main

main()
