"""A vLLM without a name that the adapter needs: one clear line."""

import json
import subprocess
import sys

import pytest

import jobs

pytest.importorskip("vllm")

# Deletes names of vLLM while the adapter is imported, as a version would lack them that calls them otherwise.
PROGRAM = """
import contextlib, importlib, json, sys
from batchinf.base.errors import EngineStartError
from batchinf.engines.installed import importing
# What vLLM itself imports late: it has these names.
from vllm import LLMEngine, SamplingParams
from vllm.v1.structured_output import backend_xgrammar

@contextlib.contextmanager
def without(names):
    modules = {name: importlib.import_module(name.rpartition(".")[0]) for name in names}
    for name in [name for name in sys.modules if name.startswith("batchinf.engines.vllm.")]:
        del sys.modules[name]
    taken = {name: vars(module).pop(name.rpartition(".")[2]) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in modules.items():
            setattr(module, name.rpartition(".")[2], taken[name])

def line_of(what, names, code):
    try:
        with without(names), importing(what):
            exec(code, {})
    except EngineStartError as error:
        return str(error)

said = [
    line_of("task generate", ["vllm.inputs.tokens_input"], "import batchinf.engines.vllm.engine"),
    line_of(
        "task generate",
        ["vllm.v1.core.sched.async_scheduler.AsyncScheduler"],
        "import batchinf.engines.vllm.engine",
    ),
    line_of(
        "task generate",
        ["vllm.reasoning.ReasoningParserManager"],
        "from batchinf.engines.vllm.structured_output.structures import VllmReasoner; VllmReasoner('a', None, {})",
    ),
    line_of(
        "task generate",
        ["vllm.sampling_params.StructuredOutputsParams"],
        "from batchinf.engines.vllm.arguments import sampling_params; from batchinf.spec.sampling import SamplingSpec; "
        "sampling_params(SamplingSpec(structured_outputs={'regex': 'a'}))",
    ),
]
print("\\n" + json.dumps(said))
"""


@pytest.mark.slow
def test_a_name_that_is_missing_costs_one_clear_line() -> None:
    import vllm

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={**jobs.inherited(), **jobs.quick_start(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lacks = f"vLLM {vllm.__version__} lacks a part that this needs: cannot import name"
    remedy = "; install a version that docs/install.md names"
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [
        f"task generate: {lacks} 'tokens_input' from 'vllm.inputs'{remedy}",
        f"task generate: {lacks} 'AsyncScheduler' from 'vllm.v1.core.sched.async_scheduler'{remedy}",
        f"model.reasoning_parser: {lacks} 'ReasoningParserManager' from 'vllm.reasoning'{remedy}",
        f"sampling.structured_outputs: {lacks} 'StructuredOutputsParams' from 'vllm.sampling_params'{remedy}",
    ]
