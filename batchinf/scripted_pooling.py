"""The scripted engine for tasks that make vectors: numbers drawn by the prompt's hash, without a model."""

import hashlib

import numpy as np

from batchinf.engine import ScriptedEngine
from batchinf.records import Completion, Request
from batchinf.spec import JobSpec


class ScriptedPooling(ScriptedEngine):
    """A vector is a function of the prompt and the spec alone; its prompt is run in one step."""

    output_room = 0

    def __init__(self, spec: JobSpec, vocab_size: int) -> None:
        assert spec.scripted is not None
        super().__init__(spec.scripted, vocab_size, 0)
        self._spec = spec
        self._drawn = np.random.default_rng(0).standard_normal(1 << 16, np.float32)

    def complete(self, request: Request) -> Completion:
        """See `ScriptedEngine.complete`: values of the shape that the task asks for."""
        pooling, num_tokens = self._spec.pooling, len(request.prompt_token_ids)
        is_states = self._spec.task == "hidden_states"
        num_positions = num_tokens if is_states and pooling.positions == "all" else 1
        width = pooling.vector_width * len(pooling.layers or (0,))
        digest = hashlib.blake2b(np.asarray(request.prompt_token_ids, np.int32).tobytes(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") % len(self._drawn)
        flat = self._drawn.take(np.arange(start, start + num_positions * width), mode="wrap")
        values = flat.reshape(num_positions, width)
        if self._spec.task == "embed" and pooling.normalize:
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        if self._spec.task == "classify" and pooling.use_activation is not False:
            values = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return Completion(request, np.zeros(0, np.int32), "stop", values=values)
