"""Which package each module is from, out of a file: transformers asks when it is imported, which takes half a second.

Most of the tests' processor time is the start of processes. The answer is the same as without this.
"""

import importlib.metadata
import json
import os
import pathlib

if found := os.environ.get("PACKAGES_DISTRIBUTIONS"):
    importlib.metadata.packages_distributions = lambda: json.loads(pathlib.Path(found).read_text())
