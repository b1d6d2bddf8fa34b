"""A whole job of task logits on real vLLM, a conversation in each row and each row's own positions."""

import json
import pathlib

import numpy as np
import pytest

import batchinf
import jobs


def test_chosen_tokens_after_each_rows_own_positions_of_a_chat(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    [first, second] = [tokenizer.encode(text, add_special_tokens=False) for text in (" the", " and")]
    rows = [{"id": n, "prompt": f"Say {n}.", "places": [-1, n] if n else [99]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(jobs.MODEL), "dtype": "float32"},
        task="logits",
        logits={"tokens": [" the", " and"], "positions": {"column": "places"}, "dtype": "float32"},
        input={"path": str(tmp_path / "rows.jsonl"), "add_generation_prompt": True},
        sampling=None,
        scripted=None,
        parallel={"data_parallel_size": 1},
        engine={"max_model_len": 256},
        output={"keep_columns": [], "include_prompt": True},
        max_error_rate=0.5,
    )
    jobs.finish(spec, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    model = AutoModelForCausalLM.from_pretrained(jobs.MODEL, dtype=torch.float32)
    results = batchinf.open(tmp_path / "out")
    logits, positions = results.ragged("logits"), results.ragged("positions")
    prompts = results.ragged("prompt_token_ids")
    assert results.array("error_type").tolist() == ["invalid_positions", *[None] * 5]
    assert logits.is_null.tolist() == [True, *[False] * 5]
    for n in range(1, 6):
        with torch.no_grad():
            expected = model(torch.tensor(prompts[n].tolist())[None]).logits[0].numpy()
        assert positions[n].tolist() == [len(prompts[n]) - 1, n]
        np.testing.assert_allclose(logits[n], expected[positions[n]][:, [*first, *second]], atol=1e-3, rtol=0)
