"""A whole job of task logits on real vLLM, a conversation in each row and each row's own positions."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import UserError, VerificationFailed
from batchinf.commands.verify import verify_job
from batchinf.spec.file import read_spec


@pytest.mark.slow
def test_chosen_tokens_after_each_rows_own_positions_of_a_chat(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    [[first], [second]] = [tokenizer.encode(text, add_special_tokens=False) for text in (" the", " and")]
    # One list of ids for both positions, or one for each.
    ids = [[first, second] if n % 2 else [[first, second], [second, n]] for n in range(7)]
    ids[6] = [first]
    rows = [{"id": n, "prompt": f"Say {n}.", "places": [-1, n] if n else [99], "ids": ids[n]} for n in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(jobs.MODEL), "dtype": "float32"},
        task="logits",
        logits={"token_ids_column": "ids", "num_token_ids": 2, "positions": {"column": "places"}, "dtype": "float32"},
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
    assert results.array("error_type").tolist() == ["invalid_positions", *[None] * 5, "invalid_token_ids"]
    assert logits.is_null.tolist() == [True, *[False] * 5, True]
    for n in range(1, 6):
        with torch.no_grad():
            expected = model(torch.tensor(prompts[n].tolist())[None]).logits[0].numpy()
        assert positions[n].tolist() == [len(prompts[n]) - 1, n]
        chosen = np.broadcast_to(np.array(ids[n]), (2, 2))
        assert results.ragged("value_token_ids")[n].tolist() == chosen.tolist()
        values = np.take_along_axis(expected[positions[n]], chosen, axis=1)
        np.testing.assert_allclose(logits[n], values, atol=1e-3, rtol=0)
    check_verified(spec)


def check_verified(spec: pathlib.Path) -> None:
    """What is stored is found good, and one number that was altered, or moved to another position, is found out."""
    good = verify_job(read_spec(spec))
    found = good.deviations["logits"]
    assert (good.verdict, good.num_rows, found.num_positions, found.num_agreeing) == ("within", 5, 10, 10)
    path = next((spec.parent / "out" / "parts").glob("*.parquet"))
    table = pq.read_table(path)
    place = table.schema.get_field_index("logits")
    rows = table["logits"].to_pylist()
    at = next(number for number, row in enumerate(rows) if row is not None)
    rows[at][1][0] += 0.01
    pq.write_table(table.set_column(place, table.field("logits"), pa.array(rows, table.field("logits").type)), path)
    altered = verify_job(read_spec(spec))
    found = altered.deviations["logits"]
    row = table["row_index"][at].as_py()
    assert found.worst == (row, 0, row)
    assert found.max_abs_delta == pytest.approx(0.01, abs=1e-3)
    assert f"worst of logits: row {row}, sample 0, place {row}: " in [*altered.lines()][4]
    with pytest.raises(
        VerificationFailed, match=r"^the stored numbers are beyond the tolerance of 0\.001; see the rows"
    ):
        altered.raise_if_beyond()
    moved = [positions and [positions[1], 99] for positions in table["positions"].to_pylist()]
    place = table.schema.get_field_index("positions")
    pq.write_table(table.set_column(place, table.field("positions"), pa.array(moved, table["positions"].type)), path)
    with pytest.raises(UserError, match=rf"^row {row} has 2 rows of logits at the positions {row}, 99 of \d+ tokens: "):
        verify_job(read_spec(spec))
