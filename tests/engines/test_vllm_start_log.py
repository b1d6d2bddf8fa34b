"""What a starting engine is doing, from lines as vLLM 0.32 prints them on a GPU. It still prints these texts."""

import importlib.util
import pathlib

import pytest

from batchinf.engines.vllm.start_log import start_detail

LOG = """
INFO 11-22 10:00:01 [gpu_model_runner.py:5040] Starting to load model meta-llama/Llama-3.1-70B...
Loading safetensors checkpoint shards:  30% Completed | 57/191 [00:10<00:23,  5.8it/s]
INFO 11-22 10:00:40 [default_loader.py:502] Loading weights took 33.10 seconds
INFO 11-22 10:00:41 [monitor.py:33] Starting torch.compile
INFO 11-22 10:00:52 [backends.py:1167] Dynamo bytecode transform time: 9.80 s
INFO 11-22 10:01:30 [monitor.py:48] torch.compile took 48.20 s in total
INFO 11-22 10:01:33 [kv_cache_utils.py:2327] GPU KV cache size: 402,790 tokens, Maximum concurrency for 8,192: 49.17x
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  30%|██▉       | 20/67 [00:02<00:05,  8.9it/s]
INFO 11-22 10:01:44 [core.py:403] init engine (profile, create kv cache, warmup model) took 60.00 s
""".strip().splitlines()
TEXTS = (
    "Starting to load model",
    "Loading safetensors checkpoint shards",
    "Multi-thread loading shards",
    "Loading weights took",
    "Starting torch.compile",
    "Dynamo bytecode transform time",
    "torch.compile took",
    "KV cache size: %s tokens",
    "Capturing CUDA graphs",
)


def test_each_step_of_a_start() -> None:
    found = [start_detail(LOG[: number + 1]) for number in range(len(LOG))]
    assert found == [
        "loading weights",
        "loading weights 57/191",
        "weights are loaded",
        "compiling",
        "compiling",
        "measuring memory",
        "making the KV cache (402,790 tokens)",
        "capturing graphs 20/67",
        "capturing graphs 20/67",
    ]


def test_a_log_of_other_texts_says_nothing() -> None:
    assert start_detail(["a line", "\x1b[31m57/191 [", ""]) == ""
    assert start_detail([]) == ""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_still_prints_these_texts() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = pathlib.Path(spec.submodule_search_locations[0])
    names = "model_executor/model_loader/*.py v1/core/*.py v1/worker/*.py compilation/*.py".split()
    source = "".join(path.read_text(encoding="utf-8") for name in names for path in folder.glob(name))
    assert [text for text in TEXTS if text not in source] == []
