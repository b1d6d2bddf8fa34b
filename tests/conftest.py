"""The environment of all tests, the real engine that they share, and the order of files: the longest first."""

import atexit
import contextlib
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stores
from fork_server import ForkServer, forking, is_replica
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

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
# If this were set, each process that starts would compile all of batchinf again.
os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "", False
jobs.shared_folder()  # of this process and of those that it starts
jobs.environment = dict(os.environ)

# The same examples in every run, however slow the machine is. `--hypothesis-profile=default` draws others; `make fuzz`
# and `make model` have seeds.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# As in the processes that tests start: see `quick/sitecustomize.py`.
gc.set_threshold(50_000, 20, 100)
# vLLM's engine freezes all objects, and DuckDB would report its own as leaked at the end.
atexit.register(gc.unfreeze)
for name in ("opentelemetry.exporter", "scipy", "sklearn"):
    sys.modules[name] = None  # type: ignore[assignment]
jobs.start_quickly()  # transformers looks for these packages when it is imported

from batchinf.base.stop_signals import STOP_SIGNALS  # noqa: E402
from batchinf.model import parameters  # noqa: E402
from batchinf.source import ranges  # noqa: E402

# Importing this adds the tasks to the spec, for tests that import little else.
from batchinf.tasks.registry import task_of  # noqa: E402

_is_frozen: list[bool] = []

_counted = parameters._counted


@functools.cache
def _counted_before(question: str) -> parameters.Described:
    return _counted(**json.loads(question))


def _counted_once(config: Any, trust_remote_code: bool, folder: str | None) -> parameters.Described:
    """Build a model with transformers once for all tests of its size: 0.1 s each. A model's own code may change."""
    if trust_remote_code:
        return _counted(config, trust_remote_code, folder)
    return _counted_before(json.dumps({"config": config, "trust_remote_code": False, "folder": None}))


parameters._counted = _counted_once

# Each file runs in one of several processes. If a long file began last, all others would wait for it.
LONGEST_FIRST = """test_ray test_end_to_end test_two_hosts test_pages test_jobs_in_buckets test_job_model
    test_taken_away test_later_runs_in_buckets test_disk test_push test_quarantine test_benchmarks test_like_nfs
    test_recovery test_bucket_model test_images_job test_vllm_compile test_vllm_image_families
    test_vllm_one_batch_file test_weekly test_try_again test_install test_changed_input test_vllm_engine
    test_schema_table test_two_at_once test_vllm_gpt_oss test_security test_buckets test_start test_backend test_pairs
    test_vllm_pooling test_folders test_coordinator test_check test_sharing test_completion_lines test_vllm_logits
    test_tasks_rerank test_stop_signals test_page test_out_of_memory test_extend test_other_stores
    test_nothing_is_lost test_columns test_whole_row test_export test_ordering test_vllm_reasoning test_choose
    test_bucket test_spec test_json test_plan test_together test_parquet_file test_bucket_files test_mirror test_cli
    test_vllm_mutants test_fresh test_recipes test_model_identity test_source test_results test_api test_worker
    test_retry test_vllm_scheduler_loops test_fork_server test_client_lines test_examples test_upload test_formats
    test_parts test_init test_reasoning_job test_elastic test_error_rate test_early_shards test_tasks_pooled
    test_manifest test_ending test_vllm_score test_fuzz test_prompt_checks test_identity test_vllm_kernels
    test_source_cache test_wrong_things test_chat test_verify test_vllm_worker test_tools_job test_sizing
    test_versions test_memory test_site test_samples test_embedding_lines test_cache_specs test_loss""".split()


# These files share one process, and so one start of vLLM's engine and of the server that forks jobs on vLLM: 20 s each.
WITH_VLLM = set(
    """test_answers test_batch_files test_chat test_completion_lines test_end_to_end test_images test_init test_verify
    test_vllm_engine test_vllm_gpt_oss test_vllm_images test_vllm_logits test_vllm_one_batch_file
    test_vllm_pooling test_vllm_reasoning test_vllm_sampling_fields test_vllm_scheduler test_vllm_score
    test_vllm_worker""".split()
)


# What imports vLLM or PyTorch into the process of the tests. Models of transformers import PyTorch.
_IMPORTS = re.compile(
    r"""^\s*(from|import)\ (vllm|torch|transformers|batchinf\.engines\.vllm)\b
    |^\s*(from|import)\ (adapters|gpt_oss|llm_generate|triton_on_cpu)\b
    |importorskip\("(vllm|torch)"\)|\bvllm_engine\b""",
    re.MULTILINE | re.VERBOSE,
)


class Scheduling(LoadFileScheduling):
    """Gives whole files to processes, and the files of `WITH_VLLM` together.

    In a run of all quick tests, only the first process collects and runs the files that import vLLM or PyTorch, and it
    runs them first: both take 14 s of processor time in each process. In a run of all slow tests, two processes do.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "vllm" if Path(file).stem in WITH_VLLM else file

    def _check_nodes_have_same_collection(self) -> bool:
        # `schedule` takes the first collection for that of all tests.
        by_length = sorted(self.registered_collections.items(), key=lambda item: -len(item[1]))
        self.registered_collections = dict(by_length)
        every = set(by_length[0][1])
        if all(every.issuperset(collection) for _, collection in by_length):
            return True
        return super()._check_nodes_have_same_collection()

    def _reschedule(self, node: WorkerController) -> None:
        is_busy = self._pending_of(self.assigned_work[node]) > 2  # as xdist has it
        if self.workqueue and not node.shutting_down and not is_busy and self._next_of(node) is None:
            node.shutdown()
        else:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if (scope := self._next_of(node)) is not None:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    def _next_of(self, node: WorkerController) -> str | None:
        """The first file of those that this process and the fewest others can run."""
        found, fewest = None, len(self.nodes) + 1
        collections = {other: set(self.registered_collections[other]) for other in self.nodes}
        for scope, tests in self.workqueue.items():
            test = next(iter(tests))
            num_able = sum(test in collection for collection in collections.values())
            if test in collections[node] and num_able < fewest:
                found, fewest = scope, num_able
        return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a process which files it leaves out. One that takes the place of another, which has died, runs all."""
    option = node.config.option
    is_whole = node.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not option.keyword
    with_vllm = 2 if option.markexpr == "slow" else 1 if "not slow" in option.markexpr else option.numprocesses
    ids = [f"gw{number}" for number in range(with_vllm, option.numprocesses)]
    node.workerinput["leaves_vllm_out"] = is_whole and node.gateway.id in ids
    node.workerinput["leaves_quick_out"] = is_whole and option.markexpr == "slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what other processes run, and files without a slow test in a run of these."""
    given = getattr(config, "workerinput", {})
    if collection_path.suffix != ".py" or not (given.get("leaves_vllm_out") or given.get("leaves_quick_out")):
        return None
    content = collection_path.read_text("utf-8")
    is_left_out = given["leaves_vllm_out"] and _IMPORTS.search(content)
    return True if is_left_out or (given["leaves_quick_out"] and "slow" not in content) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files. The order within a file stays. A run of quick tests has the fewest rows."""
    if "not slow" in config.option.markexpr:
        jobs.num_fewer = jobs.FEWEST
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Thousands of tests are a million objects, through which each start of vLLM's engine would look for garbage."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the start and the rows of jobs, before fixtures run; keep the process groups that vLLM's engines share."""
    # A test that is run once more gets new fixtures of its module, too: what failed may be a job that they have run.
    if getattr(item, "execution_count", 1) > 1:
        for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
            for definition in definitions:
                if definition.scope == "module":
                    definition.finish(item._request)  # type: ignore[attr-defined]
    jobs.may_fork = item.get_closest_marker("real_starts") is None
    has_all_rows = any(item.get_closest_marker(name) is not None for name in ("all_rows", "slow", "slurm"))
    jobs.has_fewer_rows = item.get_closest_marker("fewer_rows") is not None or not has_all_rows
    # A command that ran in an earlier test's process ignores them from its end on, and children would inherit that. A
    # library, such as Ray, may have set handlers of its own, beside which batchinf sets none.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # Engines in the tests' process share torch's process groups. The first engine that closes would destroy them.
    for name in ("batchinf.engines.vllm.engine", "vllm.v1.engine.core"):
        if (module := sys.modules.get(name)) is not None:
            module.cleanup_dist_env_and_memory = lambda: None  # type: ignore[attr-defined]
    # What vLLM's import made stays frozen. vLLM would thaw it, and freeze what a closed engine leaves.
    if "vllm.v1.engine.core" in sys.modules and not _is_frozen:
        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None
        _is_frozen.append(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Kill the jobs that a failed test has left at work: one that is held at a step would wait for ever."""
    jobs.started.clear()
    try:
        return (yield)
    except BaseException:
        for process in jobs.started:
            if process.poll() is None:
                jobs.kill(jobs.family(process.pid))
        raise


@pytest.fixture(scope="module")
def quick_replicas() -> Iterator[None]:
    """Replicas of jobs that run in the tests' own process start faster, too: a server forks them."""
    with _forked_by(jobs.fork_server()):
        yield


@pytest.fixture
def quick_vllm_replicas() -> Iterator[None]:
    """Like `quick_replicas`, for jobs on real vLLM."""
    pytest.importorskip("vllm")
    with _forked_by(jobs.fork_server(has_vllm=True)):
        yield


@contextlib.contextmanager
def _forked_by(server: ForkServer) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in jobs.quick_start().items():
            patch.setenv(name, value)

        def may_fork(command: Sequence[str]) -> bool:
            return is_replica(command) and jobs.may_fork and server.can_fork(jobs.inherited())

        patch.setattr(subprocess, "Popen", forking(server.address, may_fork))
        yield


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


@pytest.fixture
def url() -> str:
    """An output in a bucket of the tests' server that nothing has used."""
    return f"s3://{stores.BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def store() -> Iterator[stores.Proxy]:
    """The tests' server, behind a proxy of the test's own."""
    with stores.proxy() as made:
        yield made


@pytest.fixture
def store_of_this_process(store: stores.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process uses `store`, too."""
    ranges._bucket.cache_clear()  # of the store of an earlier test
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
