"""What tensor-parallel ranks divide, and the padding of MXFP4, beside vLLM's own functions."""

import pytest
from model_configs import GPT_OSS_120B, QWEN3_235B_FP8

from batchinf.model.splits import Split, splits_of, why_not_split
from batchinf.model.weights import PaddedExperts, quantization_of

pytest.importorskip("vllm")


@pytest.mark.parametrize("width", [1536, 768, 2048, 320])
def test_blocks_of_experts_are_cut_where_vllm_refuses(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.distributed
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape_moe

    config = {**QWEN3_235B_FP8, "moe_intermediate_size": width}
    splits = splits_of(config, {}, quantization_of(config, None))
    [experts] = [split for split in splits if split.name == "the width of the experts"]
    for degree in (2, 4, 8, 16):
        monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda size=degree: size)
        try:
            validate_fp8_block_shape_moe(width // degree, [128, 128])
            is_refused = False
        except ValueError:
            is_refused = True
        assert (experts.why_not(degree) is not None) == is_refused, degree


@pytest.mark.parametrize("backend", ["MARLIN", "FLASHINFER_TRTLLM_MXFP4_BF16"])
def test_mxfp4_experts_are_padded_as_vllm_pads_them(backend: str) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    for degree in (1, 2, 4, 8):
        hidden, width = mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size(
            mxfp4.Mxfp4MoeBackend[backend], 2880, 2880 // degree
        )
        assert PaddedExperts(2880, 2880).factor(degree) == pytest.approx(hidden * width * degree / 2880**2)
        assert PaddedExperts(2880, 2880, is_split=False).factor(degree) == PaddedExperts(2880, 2880).factor(1)


def test_the_vocabulary_is_padded_as_vllm_pads_it() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    for size in (32_000, 128_256, 151_936, 50_257):
        [split] = [it for it in splits_of({"vocab_size": size}, {}) if it.name == "the vocabulary, padded"]
        assert split.size == pad_vocab_size(size)
    assert why_not_split((Split("the vocabulary, padded", 50_304),), 3) is None


@pytest.mark.parametrize(
    ("config", "degree", "why"),
    [
        ({"num_attention_heads": 14}, 4, "the number of attention heads (14) cannot be divided by 4"),
        ({"num_attention_heads": 16, "num_key_value_heads": 4}, 8, None),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, 12, "the number of key and value heads (8) cannot"),
        ({"intermediate_size": 11_008}, 3, "the width of the MLP (11,008) cannot be divided by 3"),
        ({"linear_num_key_heads": 16, "linear_num_value_heads": 32}, 32, "key heads of linear attention (16)"),
        ({"mamba_num_heads": 128, "n_groups": 8}, 16, "the number of Mamba groups (8) cannot be divided by 16"),
        ({"mamba_num_heads": 128, "n_groups": 1}, 16, None),
        # A width that the model does not use: all of its layers have experts.
        ({"intermediate_size": 999, "moe_intermediate_size": 768, "num_experts": 8, "mlp_only_layers": []}, 8, None),
        (GPT_OSS_120B, 8, None),
    ],
)
def test_numbers_that_cannot_be_divided_are_named(config: dict[str, object], degree: int, why: str | None) -> None:
    found = why_not_split(splits_of(config, {}), degree)
    assert found is None if why is None else found is not None and why in found


def test_rows_of_a_group_stay_on_one_rank() -> None:
    """Qwen2.5-72B in AWQ: 29,568 / 8 = 3,696 is no multiple of 128; its checkpoints are padded to 29,696."""
    section = {"quant_method": "awq", "bits": 4, "group_size": 128}
    for width, is_offered in ((29_568, False), (29_696, True)):
        config = {"num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": width,
                  "quantization_config": section}  # fmt: skip
        splits = splits_of(config, {}, quantization_of(config, None))
        assert (why_not_split(splits, 8) is None) == is_offered
