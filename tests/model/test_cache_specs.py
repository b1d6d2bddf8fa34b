"""The arithmetic of `model.cache` against the installed vLLM's own cache specs, for written configs of 13 families."""

import json
import subprocess
import sys
from typing import Any

import pytest

import jobs
from batchinf.model.cache import KvCache, kv_cache_of, pool_of
from batchinf.model.model import text_section
from batchinf.model.weights import stage_sizes

pytest.importorskip("vllm")

_WIDTHS = {"vocab_size": 512, "max_position_embeddings": 8192, "hidden_size": 256, "intermediate_size": 512,
           "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def config_of(architecture: str, model_type: str, num_layers: int, **others: Any) -> dict[str, Any]:
    named = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": num_layers}
    return {**_WIDTHS, **named, **others}


# The first one has experts: vLLM makes its groups of ranks once, for the first model.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": config_of("Qwen3MoeForCausalLM", "qwen3_moe", 3, head_dim=64, **_EXPERTS),
    "llama": config_of("LlamaForCausalLM", "llama", 4),
    "mistral with a window": config_of("MistralForCausalLM", "mistral", 3, sliding_window=1024),
    "gemma2": config_of("Gemma2ForCausalLM", "gemma2", 4, head_dim=32, sliding_window=1024),
    "gemma3": config_of("Gemma3ForCausalLM", "gemma3_text", 8, head_dim=32, sliding_window=1024),
    "gpt_oss": config_of(
        "GptOssForCausalLM", "gpt_oss", 4, head_dim=64, sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v2": config_of(
        "DeepseekV2ForCausalLM", "deepseek_v2", 3, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        n_shared_experts=1, first_k_dense_replace=1,
    ),
    "jamba": config_of("JambaForCausalLM", "jamba", 8, num_experts=4, mamba_dt_rank=16),
    "qwen3_next": config_of(
        "Qwen3NextForCausalLM", "qwen3_next", 4, head_dim=64, shared_expert_intermediate_size=64,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, **_EXPERTS,
    ),
    "falcon_h1": config_of(
        "FalconH1ForCausalLM", "falcon_h1", 2, head_dim=32, mamba_d_ssm=512, mamba_n_heads=16, mamba_d_head=32,
        mamba_n_groups=1, mamba_d_state=64,
    ),
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_hidden_layers": 2, "vocab_size": 512,
        "hidden_size": 256, "num_heads": 16, "head_dim": 32, "state_size": 64, "expand": 2, "n_groups": 2,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4,
        "vocab_size": 512, "n_positions": 8192,
    },
    "llama4": config_of(
        "Llama4ForCausalLM", "llama4_text", 4, head_dim=32, num_local_experts=2, interleave_moe_layer_step=1,
        intermediate_size_mlp=512, attention_chunk_size=1024,
    ),
}  # fmt: skip
AVAILABLE = 1 << 30
LENGTH = 8192

# Prints, for each config, the spec of each layer, the state of each at other degrees, and the capacity of a gigabyte.
PROGRAM = """
import json, pathlib, sys
import torch
from vllm.config import ParallelConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import get_model_cls, initialize_model
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils

folder, available, length = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
found = {}
for place in sorted(folder.iterdir()):
    state_dtype = "float32" if "falcon" in place.name or "mamba2" in place.name else "bfloat16"
    config = EngineArgs(
        model=str(place), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=length,
        max_num_batched_tokens=length, enforce_eager=True, enable_prefix_caching=False,
        mamba_ssm_cache_dtype=state_dtype,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            store = "file://" + str(folder.parent / "store")
            parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        [made] = kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [available])
        model, heads, states = config.model_config, {}, {}
        for degree in (1, 2, 4, 8):
            heads[degree] = model.get_num_kv_heads(ParallelConfig(tensor_parallel_size=degree))
            of_state = getattr(get_model_cls(model), "get_mamba_state_shape_from_config", None)
            if of_state is not None:
                config.parallel_config.tensor_parallel_size = degree
                shapes, dtypes = of_state(config), get_model_cls(model).get_mamba_state_dtype_from_config(config)
                states[degree] = sum(torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes))
        config.parallel_config.tensor_parallel_size = 1
        found[place.name[3:]] = {
            "layers": [
                {
                    "spec": type(spec).__name__,
                    "bytes": getattr(spec, "real_page_size_bytes", None),
                    "block_size": spec.block_size,
                    "window": getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
                }
                for spec in specs.values()
            ],
            "heads": heads,
            "states": states,
            "state_dtype": state_dtype,
            "in_flight": config.max_in_flight_tokens,
            "block_size": config.cache_config.block_size,
            "capacity": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made),
        }
stages = [
    [layers, degree, [stop - start for start, stop in (get_pp_indices(layers, rank, degree) for rank in range(degree))]]
    for layers in range(1, 40) for degree in range(1, min(layers, 9))
]
print(json.dumps([found, stages]))
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """What vLLM says, and its stages of pipelines."""
    root = tmp_path_factory.mktemp("specs")
    for number, (name, config) in enumerate(CONFIGS.items()):
        folder = root / "configs" / f"{number:02}-{name}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    own = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    arguments = [str(root / "configs"), str(AVAILABLE), str(LENGTH)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**jobs.inherited(), **jobs.quick_start(), **own},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, stages = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found, stages


def ours(name: str, state_dtype: str) -> KvCache:
    import torch  # noqa: F401  # with these two here, models are counted in this process
    import transformers  # noqa: F401

    from batchinf.model.parameters import described

    config = {**text_section(described(CONFIGS[name]).config), **CONFIGS[name]}
    return kv_cache_of(config, CONFIGS[name], "bfloat16", {"mamba_ssm_cache_dtype": state_dtype})


SPECS = {
    "full": "FullAttentionSpec", "window": "SlidingWindowSpec", "chunk": "ChunkedLocalAttentionSpec",
    "latent": "MLAAttentionSpec", "state": "MambaSpec",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_each_layer_is_as_vllm_has_it(name: str, asked: tuple[dict[str, Any], list[Any]]) -> None:
    theirs = asked[0][name]
    cache = ours(name, theirs["state_dtype"])
    layers = [one for layer in cache.layers for one in layer]
    # Falcon-H1 has two caches in a layer, in vLLM's order: attention, then the state.
    assert len(layers) == len(theirs["layers"])
    for mine, spec in zip(layers, theirs["layers"], strict=True):
        assert spec["spec"] == SPECS[mine.kind]
        assert mine.window == spec["window"]
        if mine.state is None:
            assert mine.token_bytes() * spec["block_size"] == spec["bytes"]
            continue
        assert mine.state.num_bytes(1) == spec["bytes"]
        assert {str(degree): mine.state.num_bytes(degree) for degree in (1, 2, 4, 8)} == theirs["states"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_have_the_heads_that_vllm_gives_them(name: str, asked: tuple[dict[str, Any], list[Any]]) -> None:
    theirs = asked[0][name]
    for mine in (one for layer in ours(name, theirs["state_dtype"]).layers for one in layer if one.state is None):
        head_bytes = mine.width * mine.item_bytes
        for degree, heads in theirs["heads"].items():
            assert mine.token_bytes(int(degree)) == heads * head_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_gigabyte_holds_as_many_sequences_as_vllm_says(name: str, asked: tuple[dict[str, Any], list[Any]]) -> None:
    theirs = asked[0][name]
    cache = ours(name, theirs["state_dtype"])
    [caches] = cache.stages(1)
    pool = pool_of(caches, LENGTH, 1, in_flight_tokens=theirs["in_flight"], block_tokens=theirs["block_size"])
    # vLLM counts whole blocks, also where all layers are alike.
    assert pool.capacity(AVAILABLE) == pytest.approx(theirs["capacity"], rel=1e-3)


@pytest.mark.slow
def test_stages_are_cut_as_vllm_cuts_them(asked: tuple[dict[str, Any], list[Any]]) -> None:
    assert len(asked[1]) > 200
    for num_layers, degree, sizes in asked[1]:
        assert stage_sizes(num_layers, degree) == sizes
