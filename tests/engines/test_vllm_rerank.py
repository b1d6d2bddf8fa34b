"""`task: rerank` from columns, with a language model as cross-encoder, against transformers."""

import json
import pathlib
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

import jobs

pytest.importorskip("vllm")

QUERY = "small fox lived wood"


@pytest.mark.slow
def test_pairs_of_columns_are_verified(tmp_path: pathlib.Path) -> None:
    """A cross-encoder that is a language model, raw scores, and a document for each row."""
    rows = [{"id": f"r{n}", "query": f"fox {n}", "text": f"{QUERY} of the sea {n}"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, pad_token_id=2, num_labels=1,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(jobs.MODEL / name, tmp_path / "model")
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(tmp_path / "model"), "dtype": "float32"},
        task="rerank",
        input={"path": str(tmp_path / "rows.jsonl"), "query_column": "query", "document_column": "text"},
        pooling={"use_activation": False},
        engine={"max_model_len": 128},
        sampling=None,
        scripted=None,
        parallel={"data_parallel_size": 1},
        output={"keep_columns": []},
    )
    jobs.finish(spec)
    scores = [row["relevance_score"] for row in jobs.rows_of(tmp_path / "out")]
    assert len(set(scores)) == 12 and not all(0 < score < 1 for score in scores)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for row, score in zip(rows, scores, strict=True):
            ids = tokenizer(row["query"], row["text"], return_tensors="pt")["input_ids"]
            assert abs(float(model.float().eval()(ids).logits[0, 0]) - score) < 1e-3
    refused = jobs.run("verify", spec)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: task rerank cannot be verified, only generate, score, logits and embed"), (
        refused.stderr
    )
