"""The environment of all tests, the real engine that they share, and the order of files: the longest first."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import jobs

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

MODEL = Path(__file__).parent.parent / "sample_data" / "tiny-llama"

# vLLM and PyTorch read these on import. Processes that tests start inherit them.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)
jobs.environment = dict(os.environ)

# The same examples in every run; `--hypothesis-profile=default` draws others. `make fuzz` and `make soak` have seeds.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# As in the processes that tests start: see `quick/sitecustomize.py`.
gc.set_threshold(50_000, 20, 100)
# vLLM's engine freezes all objects, and DuckDB would report its own as leaked at the end.
atexit.register(gc.unfreeze)
sys.modules["sklearn"] = sys.modules["opentelemetry.exporter"] = None  # type: ignore[assignment]

# Importing this adds the tasks to the spec, for tests that import little else.
from batchinf.tasks.registry import task_of  # noqa: E402

# Each file runs in one of several processes. If a long file began last, all others would wait for it.
LONGEST_FIRST = """test_ray test_two_hosts
    test_job_model test_start test_quarantine test_disk test_recovery test_end_to_end test_security test_cli
    test_coordinator test_stop_signals test_fuzz test_nothing_is_lost test_check test_two_at_once test_not_begun
    test_weekly test_choose test_extend test_error_rate test_vllm_pooling test_chat test_fresh test_early_shards
    test_backend test_retry test_out_of_memory test_reasoning_job test_tasks_pooled test_vllm_score
    test_vllm_engine test_remarks test_verify test_row_sampling test_formats test_vllm_logits test_spec
    test_non_finite test_model_identity test_ordering test_fork_server test_loss test_answers test_examples
    test_source test_install test_forecast test_elastic""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files. The order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set how jobs start, before the test's fixtures run, and keep the process groups that vLLM's engines share."""
    jobs.may_fork = item.get_closest_marker("real_starts") is None
    # Engines in the tests' process share torch's process groups. The first engine that closes would destroy them.
    for name in ("batchinf.engines.vllm.engine", "vllm.v1.engine.core"):
        if (module := sys.modules.get(name)) is not None:
            module.cleanup_dist_env_and_memory = lambda: None  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator["VllmEngine"]:
    """A real engine, started once, after 10 s of imports. Its job stores the top 50, above vLLM's default limit."""
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.engine import VllmEngine
    from batchinf.spec.job import JobSpec
    from batchinf.spec.sampling import SamplingSpec

    spec = JobSpec(
        model={"name": str(MODEL)},
        input={"path": "prompts.jsonl"},
        output={"path": "out"},
        sampling=SamplingSpec(logprobs=50),
        engine={"max_model_len": 512},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = VllmEngine(task_of(spec), str(MODEL), str(MODEL))
    yield engine
    engine.close()
