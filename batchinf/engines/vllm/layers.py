"""Runs in vLLM's worker processes for `pooling.layers`: makes the model return the states between its layers.

Tested with vLLM 0.32.0.
"""

from typing import Any

import torch

from batchinf.engines.vllm.kernels.base_worker import Worker

# `pooling_arguments` gives LAYERS_WORKER as `worker_cls`, and the layers under LAYERS_CONFIG in `additional_config`; -1
# is the last layer. vLLM also uses `additional_config` to tell compiled graphs apart.
LAYERS_WORKER = f"{__name__}.LayersWorker"
LAYERS_CONFIG = "batchinf_layers"


class LayersWorker(Worker):
    """vLLM's worker with a model that returns the states between layers."""

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """See vLLM. Changes the model here, because vLLM compiles it afterwards."""
        super().load_model(*arguments, **named)
        depth = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        wanted = self.vllm_config.additional_config[LAYERS_CONFIG]
        give_layers(self.model_runner.get_model(), [depth if layer == -1 else layer for layer in wanted])


def give_layers(model: Any, layers: list[int]) -> None:
    """Make `model` return [num_tokens, num_layers × hidden_size]: the states after each of `layers`, side by side.

    layers: ascending. Raises ValueError if vLLM's implementation of the model cannot return them.
    """
    if not hasattr(model, "set_aux_hidden_state_layers"):
        name = type(model).__name__
        raise ValueError(f"vLLM's {name} gives no states between layers: leave out pooling.layers and final_norm")
    model.set_aux_hidden_state_layers(tuple(layers))
    holder = next((it for it in model.modules() if hasattr(it, "_maybe_add_hidden_state")), None)
    if holder is not None:
        _keep_copies(holder)
    forward = model.forward

    def joined(*arguments: Any, **named: Any) -> torch.Tensor:
        output = forward(*arguments, **named)
        if not isinstance(output, tuple) or len(output[1]) != len(layers):
            raise ValueError(f"vLLM's {type(model).__name__} gave no states for pooling.layers {layers}")
        return torch.cat(output[1], dim=-1)

    model.forward = joined


def _keep_copies(holder: Any) -> None:
    """Make vLLM return a copy of the embedding. The layers later add their output to the embedding in place."""

    def add(found: list[torch.Tensor], layer: int, states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if layer in holder.aux_hidden_state_layers:
            found.append(states.clone() if residual is None else states + residual)
        return found

    holder._maybe_add_hidden_state = add
