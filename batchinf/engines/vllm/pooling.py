"""The adapter to vLLM's pooling runner, which makes vectors of prompts, with the loop of `engine.py`.

Tested with vLLM 0.32.0.
"""

from typing import Any

import numpy as np
from vllm import PoolingParams

from batchinf.base.errors import SpecError
from batchinf.engines.vllm.arguments import engine_arguments
from batchinf.engines.vllm.engine import VllmEngine
from batchinf.engines.vllm.scheduling.pooling_scheduler import POOLING_SCHEDULER
from batchinf.engines.vllm.scheduling.scheduler import SCHEDULER
from batchinf.engines.vllm.worker import WORKER_EXTENSION, join_results
from batchinf.records import Completion, Request
from batchinf.tasks.base import PoolingWanted, Task


def wanted_of(task: Task) -> PoolingWanted:
    """What a task asks of the pooling runner."""
    assert task.pooling is not None, f"task {task.name} does not use the pooling runner"
    return task.pooling


def pooling_arguments(task: Task, model_path: str, tokenizer_path: str, revision: str | None) -> dict[str, Any]:
    """EngineArgs by name: those for text, with the runner, the pooler and the worker that the task needs."""
    spec = task.spec
    wanted = wanted_of(task)
    arguments = engine_arguments(task, model_path, tokenizer_path, revision)
    if arguments.get("scheduler_cls") == SCHEDULER:  # it collects tokens; pooling has none
        arguments["scheduler_cls"] = POOLING_SCHEDULER
    pooler = dict(spec.engine.get("pooler_config") or {})
    types = {"seq_pooling_type": wanted.seq_pooling_type, "tok_pooling_type": wanted.tok_pooling_type}
    pooler |= {name: value for name, value in types.items() if value is not None}
    if len(wanted.tasks) == 1:
        [pooler["task"]] = wanted.tasks
    chosen: dict[str, Any] = {"runner": "pooling", "convert": wanted.convert, "pooler_config": pooler}
    if wanted.layers:
        from batchinf.engines.vllm.layers import LAYERS_CONFIG, LAYERS_WORKER

        config = spec.engine.get("additional_config") or {}
        chosen |= {"worker_cls": LAYERS_WORKER, "additional_config": {**config, LAYERS_CONFIG: list(wanted.layers)}}
    elif not wanted.all_positions and "worker_extension_cls" not in spec.engine:
        chosen["worker_extension_cls"] = WORKER_EXTENSION
    if wanted.all_positions and "async_scheduling" not in spec.engine:
        # In 0.26 the next step may overwrite states that are still being copied.
        chosen["async_scheduling"] = False
    return {**arguments, **chosen}


class VllmPooling(VllmEngine):
    """One vLLM engine that makes vectors. Implements `engines.protocol.Engine`; `Completion.values` is float32."""

    output_room = 0
    arguments = staticmethod(pooling_arguments)

    def _started(self) -> None:
        self._wanted = wanted_of(self._task)
        self._pooling_params = self._choose_params()
        join_results(self._engine)
        pooler = self._engine.vllm_config.model_config.pooler_config
        names = ("seq_pooling_type", "tok_pooling_type")
        self.info.settings["pooling"] = {"task": self._pooling_params.task} | {
            name: str(getattr(pooler, name, None)) for name in names
        }

    def _choose_params(self) -> Any:
        """The parameters of all requests. Raises SpecError if the model does not support the task."""
        wanted, tasks = self._wanted, self._engine.get_supported_tasks()
        task = next((name for name in wanted.tasks if name in tasks), None)
        if task is None:
            words = f"with this model vLLM can only do {', '.join(sorted(tasks))}; give another task or model"
            raise SpecError(f"task: got {self._task.name}, but {words}")
        pooler = self._engine.vllm_config.model_config.pooler_config
        if task == "token_classify" and getattr(pooler, "tok_pooling_type", None) == "STEP":
            name = self._task.name
            raise SpecError(f"task: got {name}, but this model judges steps within an answer, and not the whole")
        return PoolingParams(task=task, use_activation=wanted.use_activation, dimensions=wanted.dimensions)

    def warm_up(self, request: Request) -> None:
        """See `Engine.warm_up`. Raises SpecError if the width of vectors is not the spec's."""
        self._submit("warm-up", request, self._pooling_params)
        [output] = self._run_warm_up()
        values = self._values(output)
        if values.shape[1] != self._wanted.width:
            raise self._task.width_error(values.shape[1])

    def _params(self, request: Request) -> Any:
        wanted = self._pooling_params
        start = request.token_type_start
        return PoolingParams(
            task=wanted.task,
            use_activation=wanted.use_activation if request.use_activation is None else request.use_activation,
            dimensions=request.dimensions or wanted.dimensions,
            extra_kwargs=None if start is None else {"compressed_token_type_ids": start},
        )

    def _came_whole(self, output: Any) -> bool:
        # In 0.32 an aborted request returns an empty tensor.
        return bool(output.outputs.data.numel())

    def _values(self, output: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [num_positions, width]."""
        values = output.outputs.data.float().numpy()
        values = values.reshape(1, -1) if values.ndim < 2 else values
        takes_last = self._pooling_params.task == "token_classify"
        # A view would keep vLLM's whole message in memory.
        return np.array(values[-1:] if takes_last else values, np.float32)

    def _completion(self, output: Any) -> Completion:
        request = self._live.pop(output.request_id)
        return Completion(request, np.zeros(0, np.int32), "stop", values=self._values(output))
