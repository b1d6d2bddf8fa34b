"""Memory that runs out: recognised by the very words, explained with numbers, stepped down from; whole jobs that do."""

import ast
import importlib.util
import json
import pathlib
import signal
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fleets import fleet_of

import jobs
from batchinf.fleet.backend import Ending
from batchinf.fleet.devices import Slot
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.memory.engine_settings import EngineSettings, kept
from batchinf.fleet.memory.out_of_memory import OutOfMemory, recognise
from batchinf.fleet.memory.step_down import effective, step_down
from batchinf.manifest.lines import Lowered, read_line, record_line
from batchinf.model.cache import kv_cache_of
from batchinf.model.memory import GIB, Fit
from batchinf.model.weights import Weights
from batchinf.replica.messages import Failed
from batchinf.spec.job import RUNTIME_ENGINE_ARGUMENTS, JobSpec
from batchinf.tasks.registry import task_of
from benchmarks.shapes import SHAPES

H100_BYTES = 85_017_493_504
# vLLM's and torch's words, whole. Those of vLLM are of 0.32.0.
FREE = (
    "ValueError: Free memory on device cuda:0 (60.25/79.18 GiB) on startup is less than desired GPU memory utilization "
    "(0.92, 72.85 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
FREE_64 = FREE.replace("60.25/79.18", "64.25/79.11").replace("72.85", "72.78")
FREE_CPU = (
    "ValueError: Available memory on node 0 (10.5/62.79 GiB) on startup is less than desired CPU memory utilization "
    "(0.92, 57.77 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory "
    "reserved (despite its name). To resolve: decrease `--gpu-memory-utilization` (e.g. `--gpu-memory-utilization "
    "0.5`) or reduce CPU memory used by other processes."
)
CACHE = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
    "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
LENGTH = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (9.21 GiB). Based on the available memory, the estimated "
    "maximum model length is 75440. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
    "backend) or decreasing `max_model_len` when initializing the engine. See "
    "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
LENGTH_OLD = (
    "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV "
    "cache (64416). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.42 GiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 985.06 MiB is free. Including non-PyTorch memory, this process has 78.21 GiB memory in use. Of the "
    "allocated memory 76.90 GiB is allocated by PyTorch, and 301.02 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
TORCH_IN_STEP = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.05 GiB is free. Including non-PyTorch memory, this process has 78.04 GiB memory in use."
)
LOAD = (
    "(EngineCore pid=9) ERROR 11-21 [gpu_model_runner.py:5147] Failed to load model - not enough GPU memory. Try "
    "lowering --gpu-memory-utilization to free memory for weights, increasing --tensor-parallel-size, or using "
    f"--quantization. (original error: {TORCH.partition(': ')[2]})"
)
SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering "
    "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
DRIVER = "RuntimeError: CUDA error: out of memory"
WORKER = (
    "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total "
    "capacity of 139.81 GiB of which 100.00 MiB is free.', please check the stack trace above for the root cause"
)
CPU_ALLOCATOR = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
)


def gib(number: float) -> int:
    return int(number * GIB)


@pytest.mark.parametrize(
    ("text", "was_up", "kind"),
    [
        (FREE, False, "free"),
        (FREE_CPU, False, "free"),
        (CACHE, False, "cache"),
        (LENGTH, False, "cache"),
        (LENGTH_OLD, False, "cache"),
        (TORCH, False, "batch"),
        (TORCH, True, "batch"),
        (LOAD, False, "load"),
        (SAMPLER, False, "batch"),
        (CUBLAS, True, "batch"),
        (DRIVER, True, "batch"),
        (WORKER, True, "batch"),
        (CPU_ALLOCATOR, True, "batch"),
    ],
)
def test_the_words_are_understood(text: str, was_up: bool, kind: str) -> None:
    # As the adapter gives them: in one line, cut to 400 characters; or in a log, broken by a terminal.
    for said in (text, f"vLLM could not start: {text[:400]}", text.replace(" memory", "\n  memory")):
        found = recognise(said, was_up=was_up)
        assert found is not None
        assert found.kind == kind
        assert " ".join(text.split()).find(found.words) >= 0


def test_the_share_that_is_free_is_read() -> None:
    assert oom(FREE).free_share == pytest.approx(0.761, abs=0.001)
    assert oom(FREE_CPU).free_share == pytest.approx(0.167, abs=0.001)


def test_long_words_end_with_a_sentence() -> None:
    said = oom(f"{LENGTH} {LENGTH}").words
    assert said.startswith("To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache")
    assert said.endswith("maximum model length is 75440")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ended with signal 9",
        "ValueError: The decoder prompt (length 600) is longer than the maximum model length of 512.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "INFO Free memory on device (79.1/79.18 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB).",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "OSError: [Errno 28] No space left on device",
    ],
)
@pytest.mark.parametrize("was_up", [False, True])
def test_other_words_are_left_alone(text: str, was_up: bool) -> None:
    assert recognise(text, was_up=was_up) is None


def vllm_source(*path: str) -> ast.Module:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return ast.parse(pathlib.Path(found.submodule_search_locations[0], *path).read_text(encoding="utf-8"))


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Every text of a source file, with plausible values in its gaps."""
    estimate = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else _value(ast.unparse(part), estimate)
                for part in node.values
            )
            estimate = text if text.startswith("Based on the available memory") else estimate
            yield text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _value(gap: str, estimate: str) -> str:
    if "estimated_msg" in gap:
        return estimate
    if "format_gib" in gap:
        return "16.25"
    return "0.92" if "utilization" in gap else "131072" if "len" in gap else "cuda:0"


# Fails when vLLM says it otherwise: then the words above and in `out_of_memory` have to follow.
@pytest.mark.parametrize(
    ("path", "kind", "count"),
    [
        (("v1", "worker", "utils.py"), "free", 1),
        (("v1", "worker", "cpu_worker.py"), "free", 1),
        (("v1", "core", "kv_cache_utils.py"), "cache", 3),
    ],
)
def test_the_installed_vllm_still_says_so(path: tuple[str, ...], kind: str, count: int) -> None:
    tree = vllm_source(*path)
    # Twice: what stands in a gap may come later in the walk than the text around it.
    texts = {text for _ in range(2) for text in texts_in(tree)}
    found = [failure for text in texts if (failure := recognise(text, was_up=False)) and failure.kind == kind]
    assert len(found) >= count


def test_the_installed_vllm_still_says_so_while_it_loads() -> None:
    texts = set(texts_in(vllm_source("v1", "worker", "gpu_model_runner.py")))
    assert any(text.startswith("Failed to load model - not enough GPU memory") for text in texts)
    assert [text for text in texts if "warming up sampler" in text and recognise(text, was_up=False)]


def test_the_batch_limits_are_those_of_the_installed_vllm() -> None:
    tree = vllm_source("engine", "arg_utils.py")
    [function] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_batch_defaults"]
    limits = {
        (ast.unparse(key), value.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(value, ast.Constant) and key is not None
    }
    assert {("UsageContext.LLM_CLASS", number) for number in (256, 1024, 8192, 16384)} <= limits
    assert "device_memory >= 70 * GiB_bytes and 'a100' not in device_name" in ast.unparse(function)


# -- the step down ---------------------------------------------------------------------------------------------------


def fit(shape: str = "llama-3.1-8b", **fields: Any) -> Fit:
    config = SHAPES[shape]
    kv_cache = kv_cache_of(config, config, "bfloat16", {})
    weights = {"llama-3.1-8b": 16_060_522_496, "llama-3.3-70b": 141_107_412_992}[shape]
    base = {"device_bytes": H100_BYTES, "device_name": "NVIDIA H100 80GB HBM3", "max_model_len": 131_072}
    return Fit(Weights.of_total(weights), kv_cache, **{**base, **fields})


def oom(text: str, *, was_up: bool = False) -> OutOfMemory:
    found = recognise(text, was_up=was_up)
    assert found is not None
    return found


CPU = {"device_bytes": None, "device_name": ""}
SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}


@pytest.mark.parametrize(
    ("engine", "cause", "place", "expected"),
    [
        # 60.25 of 79.18 GiB are free: 0.76, less a hundredth.
        ({}, oom(FREE), {}, {"gpu_memory_utilization": 0.75}),
        ({"gpu_memory_utilization": 0.7}, oom(FREE), {}, None),
        # The weights of 70 billion parameters on four devices take 33 GiB, one sequence 10.
        ({}, oom(FREE), {"shape": "llama-3.3-70b", "tensor_parallel_size": 4}, {"gpu_memory_utilization": 0.75}),
        ({}, oom(FREE), {"shape": "llama-3.3-70b", "tensor_parallel_size": 2}, None),
        ({}, oom(FREE_CPU), CPU, None),
        # Smaller batches leave more to the cache, unless the weights alone leave too little.
        ({}, oom(CACHE), {}, {"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
        ({}, oom(LENGTH), {}, {"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
        ({}, oom(LENGTH), {"shape": "llama-3.3-70b"}, None),
        ({"kv_cache_memory_bytes": gib(4)}, oom(LENGTH), {}, None),
        ({}, oom(LENGTH), CPU, None),
        ({}, oom(LOAD), {}, None),
        ({}, oom(SAMPLER), {}, {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.87}),
        # Without chunks a batch holds whole prompts; what is small already stays.
        ({"enable_chunked_prefill": False}, oom(SAMPLER), {}, {"max_num_seqs": 512, "gpu_memory_utilization": 0.87}),
        (SMALL, oom(SAMPLER), {}, {"gpu_memory_utilization": 0.87}),
        ({"max_num_seqs": 20}, oom(CACHE), {}, {"max_num_seqs": 16, "max_num_batched_tokens": 8192}),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 3000}, oom(CACHE), {}, {"max_num_batched_tokens": 2048}),
        ({}, oom(CUBLAS, was_up=True), {},
         {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.87}),
        ({"gpu_memory_utilization": 0.43, "max_num_batched_tokens": 2048}, oom(CUBLAS, was_up=True), {},
         {"max_num_seqs": 512}),
        ({**SMALL, "kv_cache_memory_bytes": gib(20)}, oom(CUBLAS, was_up=True), {}, {"kv_cache_memory_bytes": gib(18)}),
        ({**SMALL, "num_gpu_blocks_override": 10_000}, oom(CUBLAS, was_up=True), {}, {"num_gpu_blocks_override": 9000}),
        ({}, oom(CPU_ALLOCATOR, was_up=True), CPU, {"max_num_seqs": 128, "gpu_memory_utilization": 0.87}),
    ],
)  # fmt: skip
def test_one_step_down(
    engine: dict[str, Any], cause: OutOfMemory, place: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    found = step_down(engine, cause, fit(**place))
    assert found == expected
    assert (found or {}).keys() <= RUNTIME_ENGINE_ARGUMENTS


@pytest.mark.parametrize("cause", [oom(text, was_up=up) for text in (TORCH, CUBLAS, CPU_ALLOCATOR) for up in (0, 1)])
@pytest.mark.parametrize("place", [fit(), fit(**CPU), fit("llama-3.3-70b", tensor_parallel_size=4), Fit(None, None)])
def test_every_step_is_lower_and_there_is_a_floor(cause: OutOfMemory, place: Fit) -> None:
    engine: dict[str, Any] = {}
    for _ in range(40):
        step = step_down(engine, cause, place)
        if step is None:
            break
        assert all(value < effective(engine, place)[name] for name, value in step.items())
        engine |= step
    else:
        raise AssertionError("no floor")
    share = effective(engine, place)["gpu_memory_utilization"]
    assert place.fits(share) is not False


def test_a_large_device_has_large_batches_unless_it_is_an_a100() -> None:
    assert effective({}, fit())["max_num_seqs"] == 1024
    assert effective({}, fit(device_name="NVIDIA A100-SXM4-80GB"))["max_num_seqs"] == 256
    assert effective({}, fit(device_bytes=48 * GIB))["max_num_batched_tokens"] == 8192
    assert effective({"max_num_seqs": 64}, fit())["max_num_seqs"] == 64


# -- the job's settings ----------------------------------------------------------------------------------------------


def spec_with(**sections: Any) -> JobSpec:
    base: dict[str, Any] = {"model": "org/m", "input": {"path": "x"}, "output": {"path": "y"}}
    return JobSpec.model_validate({**base, **sections})


def lowered_by(step: dict[str, Any]) -> Lowered:
    """The record of the manifest, as it is read again."""
    record = read_line(json.loads(json.dumps(record_line(Lowered(step["lowered"], step["applies_to"])))))
    assert isinstance(record, Lowered)
    return record


def engine_of(settings: EngineSettings, incarnation: str) -> dict[str, Any]:
    return json.loads(settings.launch_spec(incarnation))["engine"]


def test_a_start_is_tried_once_more_for_each_replica() -> None:
    settings = EngineSettings(spec_with(engine={"max_model_len": 8192}), fit(max_model_len=8192))
    assert engine_of(settings, "a") == engine_of(settings, "b") == {"max_model_len": 8192}
    first = settings.judge(0, "a", oom(FREE), was_up=False)
    assert (first.action, first.step_down and first.step_down["to"]) == ("again", {"gpu_memory_utilization": 0.75})
    # The other failed with the same settings: it takes the lowered ones, and lowers nothing itself.
    second = settings.judge(1, "b", oom(FREE), was_up=False)
    assert (second.action, second.step_down) == ("again", None)
    assert (
        engine_of(settings, "c") == engine_of(settings, "d") == {"max_model_len": 8192, "gpu_memory_utilization": 0.75}
    )
    for replica, incarnation in enumerate("cd"):
        last = settings.judge(replica, incarnation, oom(SAMPLER), was_up=False)
        assert (last.action, last.step_down) == ("given up", None)
        assert "tried with gpu_memory_utilization 0.75" in last.words


def test_an_engine_that_was_up_has_its_tries_again() -> None:
    settings = EngineSettings(spec_with(), fit())
    shares = []
    for incarnation, text, was_up in [("a", SAMPLER, False), ("b", CUBLAS, True), ("c", SAMPLER, False), ("d", "", 0)]:
        shares.append(engine_of(settings, incarnation).get("gpu_memory_utilization"))
        if text:
            assert settings.judge(0, incarnation, oom(text, was_up=was_up), was_up=was_up).action == "again"
    assert shares == [None, 0.87, 0.82, 0.77]


@pytest.mark.parametrize(
    ("task", "limits", "first"),
    [
        ({"task": "score", "input": {"path": "p", "text_column": "t"}}, {},
         {"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
        ({"task": "logits", "logits": {"positions": "all"}}, {"max_num_seqs": 256, "max_num_batched_tokens": 2092},
         {"max_num_seqs": 128, "max_num_batched_tokens": 1046}),
        ({"task": "logits", "logits": {}}, {"max_num_seqs": 256},
         {"max_num_seqs": 128, "max_num_batched_tokens": 8192}),
        ({"task": "logits", "logits": {"positions": "all", "token_ids": [1]}}, {},
         {"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
    ],
)  # fmt: skip
def test_steps_begin_at_what_the_task_sets_itself(
    task: dict[str, Any], limits: dict[str, int], first: dict[str, int]
) -> None:
    spec, bare = spec_with(**task), fit()
    place = replace(bare, batch_limits=task_of(spec).default_batch_limits(128_256, bare.device_bytes))
    assert place.batch_limits == limits
    assert step_down({}, oom(CACHE), place) == first
    settings = EngineSettings(spec, place)
    settings.launch_spec("a")
    step = settings.judge(0, "a", oom(CUBLAS, was_up=True), was_up=True).step_down
    assert step is not None
    assert step["from"] == {name: {**effective({}, fit()), **limits}[name] for name in step["to"]}
    assert settings.engine == step["to"] == {**first, "gpu_memory_utilization": 0.87}
    assert kept(spec, lowered_by(step)) == settings.engine


def test_what_the_spec_says_counts_before_what_the_task_sets() -> None:
    spec = spec_with(task="score", input={"path": "p", "text_column": "t"}, engine={"max_num_batched_tokens": 3000})
    place = replace(fit(), batch_limits=task_of(spec).default_batch_limits(128_256, H100_BYTES))
    settings = EngineSettings(spec, place)
    settings.launch_spec("a")
    step = settings.judge(0, "a", oom(CUBLAS, was_up=True), was_up=True).step_down
    assert step is not None
    assert step["from"]["max_num_batched_tokens"] == 3000
    assert settings.engine == {"max_num_seqs": 512, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.87}


def test_at_the_floor_it_is_a_death_like_any_other() -> None:
    settings = EngineSettings(spec_with(), fit())
    for number in range(40):
        settings.launch_spec(str(number))
        verdict = settings.judge(0, str(number), oom(CUBLAS, was_up=True), was_up=True)
        if verdict.action != "again":
            break
    assert (verdict.action, verdict.step_down) == ("died", None)
    assert number > 5


def test_with_fail_nothing_is_tried() -> None:
    settings = EngineSettings(spec_with(on_oom="fail"), fit())
    for was_up in (False, True):
        settings.launch_spec("a")
        verdict = settings.judge(0, "a", oom(TORCH, was_up=was_up), was_up=was_up)
        assert (verdict.action, verdict.step_down) == ("given up", None)
    assert settings.engine == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"gpu_memory_utilization": 0.82, "max_num_seqs": 256}),
        ({"engine": {"max_num_seqs": 1024}}, {"gpu_memory_utilization": 0.82}),
        ({"engine": {"gpu_memory_utilization": 0.9, "max_num_seqs": 300}}, {}),
        ({"engine": {"block_size": 32}}, {"gpu_memory_utilization": 0.82, "max_num_seqs": 256}),
        ({"parallel": {"tensor_parallel_size": 2}}, {}),
    ],
)
def test_what_a_resume_keeps(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = EngineSettings(spec_with(), fit())
    lines = []
    for incarnation, text, was_up in [("a", SAMPLER, False), ("b", CUBLAS, True)]:
        settings.launch_spec(incarnation)
        step = settings.judge(0, incarnation, oom(text, was_up=was_up), was_up=was_up).step_down
        assert step is not None
        lines.append(step)
    found = kept(spec_with(**changes), lowered_by(lines[-1]))
    assert {name: value for name, value in found.items() if name != "max_num_batched_tokens"} == expected
    assert kept(spec_with(**changes), Lowered({}, {})) == {}
    # The one after goes on from there.
    assert EngineSettings(spec_with(**changes), fit(), found).engine == {**spec_with(**changes).engine, **found}


# -- a replica's end -------------------------------------------------------------------------------------------------

POINTER = "vLLM's engine died in a step: EngineDeadError: EngineCore encountered an issue. See stack trace (above) for"


@pytest.mark.parametrize(
    ("log", "failed", "ended_by", "kind"),
    [
        (f"(EngineCore pid=3) ERROR 11-21 [core.py:1] {TORCH}\nValueError: later\n", POINTER, "itself", "again"),
        (LOAD, "vLLM could not start: RuntimeError: Engine core initialization failed. See", "itself", "given up"),
        ("", f"vLLM's engine died in a step: {TORCH}", "itself", "again"),
        (f"{TORCH}\n", None, "itself", "again"),
        # What is not the cause.
        (f"{TORCH}\n", None, "outside", None),
        (f"{TORCH}\n", None, "coordinator", None),
        (f"{TORCH}\n", "vLLM's engine died in a step: ValueError: something else", "itself", None),
        ("", POINTER, "itself", None),
        ("INFO a helpful hint: CUDA out of memory is to be expected\n", POINTER, "itself", None),
    ],
)  # fmt: skip
def test_the_cause_of_an_end(
    log: str, failed: str | None, ended_by: Any, kind: str | None, tmp_path: pathlib.Path
) -> None:
    settings = EngineSettings(spec_with(), fit())
    backend = LocalBackend()
    launch: Any = None
    fleet = fleet_of(backend, [Slot(0, (), ())], launch, tmp_path, settings=settings)
    [replica] = fleet.replicas
    handle: Any = types.SimpleNamespace(incarnation="000001.0001", log_tail=log.splitlines)
    if failed is not None:
        replica.hear(Failed("EngineDeadError", failed, 1), now=0.0, at=0.0)
    verdict = fleet._judge(replica, failed or "ended", handle, Ending(ended_by, "", (), (), 1.0))
    assert (verdict.action if verdict else None) == kind


# -- whole jobs, on the scripted engine ------------------------------------------------------------------------------


def starts_of(out: pathlib.Path) -> list[int]:
    return [event["replica"] for event in jobs.events_of(out, "replica_started")]


@pytest.fixture
def once(tmp_path: pathlib.Path) -> str:
    (tmp_path / "once").mkdir()
    return str(tmp_path / "once")


@pytest.fixture
def dies(tmp_path: pathlib.Path) -> str:
    """The fault of an engine that runs out of memory in a step."""
    (tmp_path / "step").write_text(f"vLLM's engine died in a step: {TORCH_IN_STEP}")
    return f"die {tmp_path / 'step'}"


def refuses(folder: pathlib.Path, text: str) -> str:
    """The fault of an engine that cannot start."""
    (folder / "start").write_text(f"vLLM could not start: {text}")
    return f"replica.start=refuse {folder / 'start'}"


def test_a_start_without_memory_is_tried_once_more_lower(tmp_path: pathlib.Path, once: str) -> None:
    # One replica: another could finish all rows before the first is started again.
    path = jobs.spec_of(tmp_path, max_restarts=0, parallel={"data_parallel_size": 1})
    done = jobs.finish(path, faults=refuses(tmp_path, TORCH_IN_STEP), BATCHINF_FAULTS_ONCE=once)
    [step] = jobs.events_of(tmp_path / "out", "oom_step_down")
    assert step["from"] == {"max_num_seqs": 256, "gpu_memory_utilization": 0.92}
    assert step["to"] == step["lowered"] == {"max_num_seqs": 128, "gpu_memory_utilization": 0.87}
    assert "max_num_seqs 256 -> 128" in done.stderr
    assert starts_of(tmp_path / "out") == [0, 0]
    assert tuple(jobs.rows_of(tmp_path / "out")) == jobs.unhurt()


def test_a_start_without_memory_is_tried_no_more_than_that(tmp_path: pathlib.Path) -> None:
    done = jobs.run("run", jobs.spec_of(tmp_path), faults=refuses(tmp_path, FREE_64))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert last.count("out of memory: Free memory on device cuda:0 (64.25/79.11 GiB)") == 1
    assert "; end what else runs on the device" in last
    assert "tried with gpu_memory_utilization 0.8 already" in last
    assert "Traceback" not in done.stderr
    [step] = jobs.events_of(tmp_path / "out", "oom_step_down")
    assert step["to"] == {"gpu_memory_utilization": 0.8}
    assert sorted(starts_of(tmp_path / "out")) == [0, 0, 1, 1]


def test_memory_that_runs_out_in_a_step_costs_no_row(tmp_path: pathlib.Path, once: str, dies: str) -> None:
    # Each of the two passages ends an engine; neither counts as a restart.
    path = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1}, max_restarts=0)
    jobs.finish(path, faults=f"engine.step:20={dies},engine.step:60={dies}", BATCHINF_FAULTS_ONCE=once)
    steps = jobs.events_of(tmp_path / "out", "oom_step_down")
    assert [step["to"] for step in steps] == [
        {"max_num_seqs": 128, "gpu_memory_utilization": 0.87},
        {"max_num_seqs": 64, "gpu_memory_utilization": 0.82},
    ]
    assert starts_of(tmp_path / "out") == [0, 0, 0]
    assert tuple(jobs.rows_of(tmp_path / "out")) == jobs.unhurt()


@pytest.mark.slow
def test_a_resume_goes_on_with_the_lowered_settings(tmp_path: pathlib.Path, once: str, dies: str) -> None:
    # One replica, which has run out of memory long before ten parts are there.
    path = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1})
    faults = f"engine.step:20={dies},coordinator.after_publish:10=kill"
    killed = jobs.run("run", path, faults=faults, BATCHINF_FAULTS_ONCE=once)
    assert killed.returncode == -signal.SIGKILL
    [step] = jobs.events_of(tmp_path / "out", "oom_step_down")
    done = jobs.finish(path, faults=f"engine.step:21={dies}", BATCHINF_FAULTS_ONCE=once)
    assert "continuing with engine.max_num_seqs 128, engine.gpu_memory_utilization 0.87" in done.stderr
    assert [event["from"] for event in jobs.events_of(tmp_path / "out", "oom_step_down")] == [step["from"], step["to"]]
    assert tuple(jobs.rows_of(tmp_path / "out")) == jobs.unhurt()


@pytest.mark.parametrize("at_start", [True, False])
def test_on_oom_fail_ends_the_job(at_start: bool, tmp_path: pathlib.Path, dies: str) -> None:
    faults = refuses(tmp_path, CACHE) if at_start else f"engine.step:20={dies}"
    done = jobs.run("run", jobs.spec_of(tmp_path, on_oom="fail"), faults=faults)
    assert done.returncode == 2
    assert "on_oom is fail" in done.stderr.strip().splitlines()[-1]
    assert jobs.events_of(tmp_path / "out", "oom_step_down") == []
    assert sorted(starts_of(tmp_path / "out")) == [0, 1]


# -- real vLLM on the CPU --------------------------------------------------------------------------------------------


def real_job(folder: pathlib.Path, engine: dict[str, Any], **sections: Any) -> pathlib.Path:
    rows = jobs.PROMPTS.read_text(encoding="utf-8").split("\n")[:12]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    base: dict[str, Any] = {"input": {"path": str(folder / "prompts.jsonl")}, "parallel": {"data_parallel_size": 1}}
    return jobs.spec_of(folder, engine=engine, scripted=None, **base, **sections)


@pytest.mark.slow
def test_a_sequence_that_real_vllm_cannot_hold_is_explained(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    # A million tokens of 2 KiB, in float32, in a cache of 1 GiB.
    engine = {"max_model_len": 1_000_000, "hf_overrides": {"max_position_embeddings": 1_000_000}, "max_num_seqs": 4,
              "max_num_batched_tokens": 512}  # fmt: skip
    done = jobs.run("run", real_job(tmp_path, engine), VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "out of memory: To serve at least one request with the model's max seq len (1000000), (1.9" in last
    assert "VLLM_CPU_KVCACHE_SPACE" in last
    assert "engine.max_model_len" in last
    assert starts_of(tmp_path / "out") == [0]


@pytest.mark.slow
def test_real_vllm_is_started_with_the_lowered_settings(tmp_path: pathlib.Path, once: str, dies: str) -> None:
    pytest.importorskip("vllm")
    path = real_job(tmp_path, {"max_model_len": 512, "max_num_seqs": 8})
    jobs.finish(path, faults=f"engine.step:5={dies}", BATCHINF_FAULTS_ONCE=once)
    ready = [event["settings"]["engine_arguments"] for event in jobs.events_of(tmp_path / "out", "ready")]
    assert [arguments.get("gpu_memory_utilization") for arguments in ready] == [None, 0.87]
    assert jobs.table_of(tmp_path / "out").num_rows == 12
