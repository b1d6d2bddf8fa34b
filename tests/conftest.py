"""The one real engine that the tests share, and the order in which files are run: the longest first."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jobs

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

MODEL = Path(__file__).parent.parent / "sample_data" / "tiny-llama"

# Read when vLLM and PyTorch are imported; processes that tests start inherit them.
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

# Here too, as in the processes that tests start: see `quick/sitecustomize.py`.
gc.set_threshold(50_000, 20, 100)
# vLLM's engine freezes all objects that there are; DuckDB lists its own among those that are left at the end.
atexit.register(gc.unfreeze)
sys.modules["sklearn"] = sys.modules["opentelemetry.exporter"] = None  # type: ignore[assignment]

# It adds the tasks to the spec, for tests that read a spec and import little else.
from batchinf.tasks.registry import task_of  # noqa: E402

# Each file runs in one of several processes: a long one that begins last would keep all of them waiting.
LONGEST_FIRST = """test_head_start test_quarantine test_disk test_recovery test_end_to_end test_security test_cli
    test_coordinator test_stop_signals test_fuzz test_nothing_is_lost test_check test_two_at_once test_not_begun
    test_weekly test_choose test_extend test_error_rate test_vllm_pooling test_chat test_fresh test_early_shards
    test_backend test_retry test_out_of_memory test_reasoning_job test_tasks_pooled test_vllm_score
    test_vllm_engine test_remarks test_verify test_row_sampling test_formats test_vllm_logits test_spec
    test_non_finite test_model_identity test_ordering test_fork_server test_loss test_answers test_examples
    test_source test_install test_forecast test_elastic""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, and leave the order within each as it is."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set how jobs start, for the test's fixtures too, and keep the process groups that vLLM's engines share."""
    jobs.may_fork = item.get_closest_marker("real_starts") is None
    # Engines in the tests' own processes share them, and the first one that is closed would tear them down.
    for name in ("batchinf.engines.vllm.engine", "vllm.v1.engine.core"):
        if (module := sys.modules.get(name)) is not None:
            module.cleanup_dist_env_and_memory = lambda: None  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator["VllmEngine"]:
    """Started once, after some 10 s of imports. Its job asks for the top 50, more than vLLM allows by default."""
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
