"""A vLLM without some of its names: what is optional costs its feature alone, and what is not costs one clear line."""

import json
import subprocess
import sys

import pytest
from conftest import MODEL

import jobs

pytest.importorskip("vllm")

# Deletes names of vLLM while the adapter is imported, as a version would lack them that calls them otherwise.
PROGRAM = """
import contextlib, importlib, json, sys
from batchinf.base.errors import EngineStartError
from batchinf.engines.installed import importing
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of
# What vLLM itself imports late: it has these names.
from vllm import LLMEngine, PoolingParams, SamplingParams
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

model, optional = sys.argv[1], json.loads(sys.argv[2])
said = [
    line_of("task generate", ["vllm.inputs.tokens_input"], "import batchinf.engines.vllm.engine"),
    line_of(
        "task generate",
        ["vllm.reasoning.ReasoningParserManager"],
        "from batchinf.engines.vllm.structured_output.structures import Reasoner; Reasoner('a', None, {})",
    ),
    line_of(
        "task generate",
        ["vllm.sampling_params.StructuredOutputsParams"],
        "from batchinf.engines.vllm.arguments import sampling_params; from batchinf.spec.sampling import SamplingSpec; "
        "sampling_params(SamplingSpec(structured_outputs={'regex': 'a'}))",
    ),
]
with without(optional):
    from batchinf.engines.vllm.engine import VllmEngine
    from batchinf.engines.vllm.pooling import VllmPooling
    from batchinf.engines.vllm.structured_output.structures import compiled_by

    compiled = compiled_by({"regex": "a+"}, "auto")
sampling = SamplingSpec(temperature=0, logprobs=2, ignore_eos=True)
spec = JobSpec(model={"name": model}, input={"path": "x"}, output={"path": "y"}, engine={"max_model_len": 64},
               sampling=sampling)
engine = VllmEngine(task_of(spec), model, model)
engine.add(Request(0, 0, [5, 6, 7], sampling, max_tokens=8))
while engine.num_unfinished():
    completions = engine.step()
found = completions[0].logprobs.logprobs.shape
engine.close()
print("\\n" + json.dumps({"said": said, "compiled": compiled, "found": found}))
"""
OPTIONAL = [
    "vllm.distributed.parallel_state.cleanup_dist_env_and_memory",
    "vllm.distributed.parallel_state.get_tp_group",
    "vllm.exceptions.VLLMValidationError",
    "vllm.lora.peft_helper.PEFTHelper",
    "vllm.lora.request.LoRARequest",
    "vllm.reasoning.ReasoningParserManager",
    "vllm.triton_utils.HAS_TRITON",
    "vllm.triton_utils.tl",
    "vllm.triton_utils.triton",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.engine.exceptions.EngineDeadError",
    "vllm.v1.engine.output_processor.LogprobsProcessor",
    "vllm.v1.outputs.LogprobsLists",
    "vllm.v1.outputs.LogprobsTensors",
    "vllm.v1.structured_output.backend_guidance.has_guidance_unsupported_json_features",
    "vllm.v1.structured_output.backend_outlines.validate_structured_output_request_outlines",
    "vllm.v1.structured_output.utils.grammar_is_likely_lark",
]


@pytest.mark.slow
def test_a_name_that_is_missing_costs_what_needs_it() -> None:
    import vllm

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL), json.dumps(OPTIONAL)], capture_output=True, text=True, check=False,
        env={**jobs.inherited(), **jobs.quick_start(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *log, answer = done.stdout.strip().splitlines()
    found = json.loads(answer)
    lacks = f"vLLM {vllm.__version__} lacks a part that this needs: cannot import name"
    remedy = "; install a version that docs/install.md names"
    assert found["said"] == [
        f"task generate: {lacks} 'tokens_input' from 'vllm.inputs'{remedy}",
        f"model.reasoning_parser: {lacks} 'ReasoningParserManager' from 'vllm.reasoning'{remedy}",
        f"sampling.structured_outputs: {lacks} 'StructuredOutputsParams' from 'vllm.sampling_params'{remedy}",
    ]
    assert (found["compiled"], found["found"]) == ("xgrammar", [8, 3])
    version = f"vLLM {vllm.__version__} has no vllm.v1.core.sched.async_scheduler.AsyncScheduler: "
    assert f"{version}outputs are sent at each step, which is slower for small models" in log
