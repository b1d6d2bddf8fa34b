"""Images made ready in processes of their own: equal to those of one process, also when processes die."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from pictures import VISION
from PIL import Image
from vllm import EngineArgs
from vllm.renderers import renderer_from_config

from batchinf.base.errors import RequestRefused
from batchinf.engines.vllm.rendering import Rendering, processes_for

TEXT = "Look at <image> and say:"
_LIMIT_S = 400  # a process imports vLLM: 10 s of processor time

pytestmark = pytest.mark.timeout(2 * _LIMIT_S)


def test_processes_pay_for_slow_images_on_many_cores() -> None:
    slow, fast = [0.06] * 4, [0.4, 0.4, 0.4, 0.01]
    assert processes_for(slow, 16) == 4
    assert processes_for(slow, 200) == 8
    assert [processes_for(slow, 7), processes_for(fast, 16), processes_for(slow[1:], 16)] == [0, 0, 0]


def engine() -> Any:
    """What `Rendering` needs of an engine. Without a prefix cache, vLLM does not name images by their pixels."""
    arguments = EngineArgs(
        model=str(VISION), dtype="float32", max_model_len=512, enable_prefix_caching=False, mm_processor_cache_gb=0
    )
    config = arguments.create_engine_config()
    return SimpleNamespace(vllm_config=config, renderer=renderer_from_config(config))


@pytest.fixture(scope="module")
def one() -> Rendering:
    """In this process."""
    return Rendering(engine(), 0)


@pytest.fixture(scope="module")
def two() -> Iterator[Rendering]:
    """In two processes."""
    rendering = Rendering(engine(), 2)
    assert rendering._first is not None
    rendering._first.result(_LIMIT_S)
    yield rendering
    rendering.stop()


@pytest.fixture(scope="module")
def ids(one: Rendering) -> list[int]:
    token_ids: list[int] = one._renderer.tokenizer(TEXT)["input_ids"]
    return token_ids


def pictures() -> list[Image.Image]:
    random = np.random.RandomState(1)
    return [Image.fromarray(random.randint(0, 256, (40 + n, 60, 3)).astype(np.uint8)) for n in range(6)]


class Deadly:
    """In place of a picture: ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.mark.slow
def test_equal_to_one_process(one: Rendering, two: Rendering, ids: list[int]) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda picture: two.render(ids, [picture]), pictures()))
    assert {process.pid for process in psutil.Process().children()} >= {*two._pool._processes}  # type: ignore[union-attr]
    names = set()
    for picture, rendered in zip(pictures(), found, strict=True):
        expected = one.render(ids, [picture])
        assert rendered.token_ids == expected.token_ids
        assert rendered.num_bytes == expected.num_bytes > 0
        assert rendered.image_positions.tolist() == expected.image_positions.tolist()
        assert tensors(rendered) == tensors(expected)
        names |= {*rendered.for_ids([])["mm_hashes"]["image"], *expected.for_ids([])["mm_hashes"]["image"]}
    # vLLM takes images of one name for the same image.
    assert len(names) == 2 * len(found)
    with pytest.raises(RequestRefused) as refusal:
        two.render(ids, pictures()[:2])
    assert refusal.value.error.error_type == "image_refused"


def tensors(rendered: Any) -> dict[str, Any]:
    [item] = rendered.for_ids([])["mm_kwargs"]["image"]
    return {name: field.data.tolist() for name, field in item.items()}


@pytest.mark.slow
def test_dead_processes_are_replaced(two: Rendering, ids: list[int]) -> None:
    """A picture that kills its process three times is refused. Another one beside it is not."""
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(two.render(ids, pictures()[:1])))
    thread.start()
    with pytest.raises(RequestRefused) as refusal:
        two.render(ids, [Deadly()])
    assert refusal.value.error.error_message == "3 processes died while they made tensors of the images"
    thread.join(_LIMIT_S)
    assert len(others) == 1


_KILLS_ITSELF = """
import multiprocessing, os, signal
from concurrent.futures import ProcessPoolExecutor
from batchinf.engines.vllm.rendering import _end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_replica(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(_KILLS_ITSELF)
    ended = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, timeout=_LIMIT_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(_LIMIT_S)
