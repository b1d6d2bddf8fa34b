"""The comparison at an engine's start refuses each wrong variant of a piece, and accepts the piece.

Triton and FlashAttention run on GPUs alone, and PyTorch takes their place. `benchmarks/mutants.py` has the variants and
runs them on a GPU.
"""

import pathlib

import pytest
import torch

pytest.importorskip("vllm")

from batchinf.engines.vllm.kernels import attention
from batchinf.engines.vllm.kernels.comparison import AttentionShape, example, require_close, scales_of
from benchmarks import mutants

pytestmark = pytest.mark.skipif(attention.HAS_TRITON, reason="benchmarks/mutants.py runs them on a GPU")


@pytest.mark.parametrize(
    ("piece", "mutant"),
    [
        pytest.param(piece, mutant, id=f"{piece} {mutant.name}")
        for piece, (_, variants) in mutants.PIECES.items()
        for mutant in variants
    ],
)
def test_a_wrong_variant_is_refused(piece: str, mutant: mutants.Mutant, tmp_path: pathlib.Path) -> None:
    text, is_right = mutants.verdict(mutants.run(piece, mutant, str(tmp_path)), is_mutant=True)
    assert is_right, text


@pytest.mark.parametrize("piece", mutants.PIECES)
def test_the_piece_is_accepted(piece: str, tmp_path: pathlib.Path) -> None:
    text, is_right = mutants.verdict(mutants.run(piece, None, str(tmp_path)), is_mutant=False)
    assert is_right, text
    assert len({mutant.name for mutant in mutants.PIECES[piece][1]}) >= 8


@pytest.mark.parametrize(("error", "is_close"), [(0.01, True), (0.03, False), (torch.nan, False)])
def test_a_result_may_differ_by_a_part_of_its_length(error: float, is_close: bool) -> None:
    expected = torch.randn(5, 4, 64) * torch.tensor([1e-4, 1, 1e4, 1, 1])[:, None, None]
    expected[3] = 0
    found = expected.clone()
    found[0, 2] *= 1 + error
    if is_close:
        require_close(found, expected)
    else:
        with pytest.raises(AssertionError, match="1 of 20 results differ"):
            require_close(found, expected)


def test_a_long_request_shares_blocks_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinf.engines.vllm.kernels.comparison._MOST_NUMBERS", 40 * 16 * 2 * 2 * 64)
    shape = AttentionShape(num_heads=4, num_key_heads=2, head_size=64, dtype=torch.bfloat16)
    given = example((5, 16 * 100, 33), shape, "cpu")
    assert len(given["k"]) == 40
    assert set(given["block_table"][1].tolist()) == set(range(40))
    assert given["block_table"].shape == (3, 100)


def test_a_layer_s_scale_of_one_is_replaced() -> None:
    layer = torch.nn.Module()
    layer._q_scale, layer._k_scale, layer._v_scale = torch.tensor(1.0), torch.tensor(0.125), torch.ones(2)
    assert scales_of(layer) == (0.5, 0.125, 2.0)
