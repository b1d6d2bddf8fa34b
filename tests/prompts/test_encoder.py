"""Loading a tokenizer imports transformers, which reads no more of the installed packages than it needs."""

import importlib.metadata
import subprocess
import sys

import jobs
from batchinf.prompts.encoder import _Distributions

LOAD = f"""
import importlib.metadata
read_all = importlib.metadata.packages_distributions
def refuse():
    raise AssertionError("the metadata of all packages is read")
importlib.metadata.packages_distributions = refuse
from batchinf.prompts.encoder import load_tokenizer
assert load_tokenizer({str(jobs.MODEL)!r}, False).encode("a")
assert importlib.metadata.packages_distributions is refuse
from transformers.utils import import_utils
assert import_utils._is_package_available("torch", True) == (True, importlib.metadata.version("torch"))
import_utils.PACKAGE_DISTRIBUTION_MAPPING._read_all = read_all
assert import_utils.PACKAGE_DISTRIBUTION_MAPPING["yaml"] == ["PyYAML"]
"""

AT_ONCE = f"""
import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from batchinf.prompts.encoder import load_tokenizer
read_all = importlib.metadata.packages_distributions
together = Barrier(4)
def load(_):
    together.wait()
    return load_tokenizer({str(jobs.MODEL)!r}, False).encode("a")
with ThreadPoolExecutor(4) as pool:
    first, *others = pool.map(load, range(4))
assert others == [first] * 3
assert importlib.metadata.packages_distributions is read_all
"""


def test_threads_may_load_the_first_tokenizer_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, cwd=jobs.ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_no_metadata_of_all_packages_is_read_to_load_a_tokenizer() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, cwd=jobs.ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rest_is_what_python_says() -> None:
    read_all = importlib.metadata.packages_distributions
    lazy = _Distributions(read_all)
    assert lazy["torch"] == ["torch"]
    assert lazy._all is None
    expected = read_all()
    assert {name: sorted({*lazy[name]}) for name in lazy} == {name: sorted({*expected[name]}) for name in expected}
    assert "no_such_package" not in lazy and lazy.get("flash_attn", []) == expected.get("flash_attn", [])
