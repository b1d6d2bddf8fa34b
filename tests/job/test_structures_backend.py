"""The backend of structured outputs: one for all rows, replicas and resumes of a job."""

import json
import pathlib
from typing import Any

import pytest

import jobs
from batchinf.job.open import over_rows, prepare_job
from batchinf.job.resolve import _with_backend
from batchinf.model.memory import Fit
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec

CONFIG = "structured_outputs_config"
SCHEMA = {"structured_outputs": {"json": {"type": "object"}}}


def spec_of(folder: pathlib.Path, **sections: Any) -> Any:
    return read_spec(jobs.spec_of(folder, **{"scripted": None, "sampling": SCHEMA, **sections}))


@pytest.mark.parametrize(
    ("sections", "config"),
    [
        ({}, {"backend": "guidance"}),
        ({"engine": {CONFIG: {"backend": "auto"}}}, {"backend": "guidance"}),
        ({"engine": {CONFIG: {"enable_in_reasoning": True}}}, {"enable_in_reasoning": True, "backend": "guidance"}),
        ({"engine": {CONFIG: {"backend": "xgrammar"}}}, {"backend": "xgrammar"}),
        ({"sampling": {"max_tokens": 5}}, None),
        ({"scripted": {}}, None),
    ],
)
def test_a_new_job_has_a_fixed_backend_in_its_identity(
    sections: dict[str, Any], config: dict[str, Any] | None, tmp_path: pathlib.Path
) -> None:
    prepared = prepare_job(spec_of(tmp_path, **sections))
    assert prepared.spec.engine.get(CONFIG) == config
    assert prepared.file.spec.engine.get(CONFIG) == config
    assert prepared.identity_of("x").get(f"engine.{CONFIG}") == config


def test_rows_of_a_batch_file_have_a_fixed_backend(tmp_path: pathlib.Path) -> None:
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": str(jobs.MODEL), "prompt": "a"},
    }
    file = spec_of(tmp_path, sampling={"max_tokens": 5}, input={"id_column": None}, output={"keep_columns": []})
    prepared = prepare_job(file)
    assert CONFIG not in prepared.spec.engine  # the input has not been seen
    assert over_rows(prepared, [row]).spec.engine[CONFIG] == {"backend": "guidance"}


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        (None, {"backend": "guidance"}, {"backend": "guidance"}),
        (None, {"backend": "xgrammar"}, {"backend": "xgrammar"}),
        (None, None, None),  # it began before the backend was fixed
        ({"enable_in_reasoning": True}, {"enable_in_reasoning": True, "backend": "guidance"},
         {"enable_in_reasoning": True, "backend": "guidance"}),
        ({"backend": "outlines"}, {"backend": "guidance"}, {"backend": "outlines"}),  # the resume is then refused
    ],
)  # fmt: skip
def test_a_begun_job_keeps_its_backend(config: Any, before: Any, after: Any, tmp_path: pathlib.Path) -> None:
    spec: JobSpec = spec_of(tmp_path, **({"engine": {CONFIG: config}} if config else {})).spec
    began_as = {"task": "generate", **({f"engine.{CONFIG}": before} if before else {})}
    assert _with_backend(spec, began_as).engine.get(CONFIG) == after


def test_replicas_get_the_backend_that_only_the_input_has_shown(tmp_path: pathlib.Path) -> None:
    """A batch file may be recognised after the settings were made."""
    from batchinf.fleet.memory.engine_settings import EngineSettings

    before: JobSpec = spec_of(tmp_path, sampling={"max_tokens": 5}, engine={"max_num_seqs": 64}).spec
    fit = Fit(None, None)
    after = before.model_copy(update={"engine": {**before.engine, CONFIG: {"backend": "guidance"}}})
    launched = json.loads(EngineSettings(before, fit, {"max_num_seqs": 32}).launch_spec("1.1", after))
    assert launched["engine"] == {"max_num_seqs": 32, CONFIG: {"backend": "guidance"}}


def test_validate_names_what_is_only_checked_in_schemas_of_rows(tmp_path: pathlib.Path) -> None:
    def line(number: int, schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": str(jobs.MODEL), "messages": [{"role": "user", "content": "a"}], "response_format": form}
        return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})

    schemas = [
        {"type": "object"},
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        {"allOf": [{"type": "string"}, {"type": "number"}]},
    ]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(line(number, schema) + "\n" for number, schema in enumerate(schemas)))
    spec = jobs.spec_of(
        tmp_path,
        scripted=None,
        input={"path": str(batch), "id_column": None},
        output={"keep_columns": []},
        max_error_rate=1,
    )
    done = jobs.run("validate", spec)
    assert done.returncode == 0, done.stderr
    lines = [text for text in done.stdout.splitlines() if text.startswith("structured outputs of rows")]
    assert lines[0].endswith("3 schemas in the sample, all by guidance")
    assert "uniqueItems only checked, not enforced" in lines[1]
    assert "1 cannot be compiled, so that their rows are errors" in lines[2]
    assert "allOf" in lines[2]
