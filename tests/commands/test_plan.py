"""`batchinf plan` for models and jobs, by its text and its JSON."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import hub_server
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_configs import MIXTRAL_8X7B, model_folder

import batchinf
import jobs
from batchinf.base.errors import UserError
from batchinf.commands.plan.plan import PlanOptions, make_plan
from batchinf.model.memory import GIB
from batchinf.source.files import InputLocation
from batchinf.source.rows import sample_input


def planned(*arguments: str) -> dict[str, Any]:
    done = jobs.run("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_has_lengths_time_and_a_choice(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, parallel=None)
    report = planned(str(path), "--gpu", "h200", "--gpus", "4", "--price", "2")
    [gpu] = report["gpus"]
    assert report["job"]["num_rows"] == jobs.num_fewer
    assert report["job"]["num_sampled"] == jobs.num_fewer
    assert report["job"]["output"] == pytest.approx(32, rel=0.05)
    assert gpu["chosen"]["degrees"]["tensor"] == 1
    assert gpu["chosen"]["data"] == 4
    assert gpu["gpu_hours"] == pytest.approx(gpu["seconds"] * 4 / 3600)
    assert gpu["cost"]["total"] == pytest.approx(gpu["gpu_hours"] * 2)
    num_tokens = jobs.num_fewer * (report["job"]["prompt"] + report["job"]["output"])
    assert gpu["cost"]["cents_per_million_tokens"] * num_tokens / 1e6 == pytest.approx(gpu["gpu_hours"] * 200)
    assert gpu["cost"]["cents_per_thousand_rows"] * jobs.num_fewer / 1e3 == pytest.approx(gpu["gpu_hours"] * 200)
    by_spec = planned(str(path), "--gpu", "h200", "--gpus", "4", "--set", "price_per_gpu_hour=2")
    assert by_spec["gpus"][0]["cost"] == gpu["cost"]
    assert report["choice"].startswith("4 × H200 SXM: tensor 1 × data 4: the model fits one GPU")
    assert not (tmp_path / "out").exists()


def test_what_would_make_a_job_cheaper_is_noted(tmp_path: pathlib.Path) -> None:
    """A number for long sequences, labels with a request each, and a model's folder without a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    where = {"path": str(jobs.PROMPTS), "id_column": None, "choices": ["yes", "no idea"], "context_column": "prompt"}
    sections = {"task": "score", "sampling": None, "model": str(folder), "input": {**where, "prompt_column": None}}
    path = jobs.spec_of(tmp_path, **sections, output={"keep_columns": []}, scripted=None)
    without = planned(str(path), "--gpu", "h100")["notes"]
    assert "has no tokenizer.json; copy it there, or name a tokenizer in model.tokenizer" in without[0]
    notes = planned(str(path), "--gpu", "h100", "--set", f"model.tokenizer={jobs.MODEL}")["notes"]
    assert any("label.md#one-request-for-all-labels" in note for note in notes)
    [note] = [note for note in notes if "engine.max_model_len: auto" in note]
    assert "a sequence may have 32,768" in note and "not 4.0 GiB" in note
    bounded = planned(str(path), "--gpu", "h100", "--set", f"model.tokenizer={jobs.MODEL}",
                      "--set", "engine.max_model_len=512")["notes"]  # fmt: skip
    assert not any("max_model_len: auto" in note for note in bounded)


def test_a_job_without_its_input_and_a_model_by_its_config(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, input={"path": str(tmp_path / "none.jsonl")})
    report = planned(str(path), "--gpu", "a100")
    assert report["job"] is None
    assert "none.jsonl" in report["notes"][0]
    of_model = planned(str(jobs.MODEL / "config.json"), "--gpu", "a100", "--set", "model.quantization=fp8")
    assert of_model["model"]["weight_bytes"] < report["model"]["weight_bytes"]
    assert len(planned(str(jobs.MODEL))["gpus"]) > 12


def test_a_config_of_the_working_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.MODEL)
    assert make_plan("config.json", (), PlanOptions(gpus=("h200",))).model.name == str(jobs.MODEL)


def test_rows_that_are_not_there_yet(tmp_path: pathlib.Path) -> None:
    path = str(jobs.spec_of(tmp_path))
    arguments = (path, "--gpu", "h200", "--rows", "1000000")
    found = planned(*arguments)
    assert found["job"]["num_rows"] == found["job"]["num_requests"] == 1_000_000
    assert found["job"]["num_sampled"] == jobs.num_fewer
    without = planned(*arguments, "--set", f"input.path={tmp_path}/none.jsonl", "--price", "2")
    assert without["job"] is None
    [gpu] = without["gpus"]
    assert gpu["cost"]["total"] == pytest.approx(2 * gpu["gpu_hours"]) and gpu["seconds"] > 90
    assert "(for assumed prompts of 1,024 and outputs of 32 tokens)" in without["choice"]


def test_a_missing_chat_template_is_said_without_the_input(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(jobs.MODEL, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    where = {"path": str(tmp_path / "none.jsonl"), "messages_column": "chat"}
    report = planned(str(jobs.spec_of(tmp_path, model=str(model), input=where)), "--gpu", "a100")
    assert any("it needs a chat template" in note for note in report["notes"])


def test_samples_count_once_if_rows_have_their_own_temperature(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a text", "heat": heat}) + "\n" for heat in (0.5, 0.7, None, 1.0)))
    sampling = {"n": 3, "temperature": {"column": "heat"}, "max_tokens": 8}
    output = {"path": str(tmp_path / "out")}
    report = planned(
        "--gpu", "a100-80", jobs.spec_of(tmp_path, input=None, sampling=None, output=None),
        "--set", f"input={json.dumps({'path': str(rows)})}", "--set", f"sampling={json.dumps(sampling)}",
        "--set", f"output={json.dumps(output)}",
    )  # fmt: skip
    assert report["job"]["num_requests"] == 12
    assert report["job"]["num_sampled"] == 4


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # transformers makes a tokenizer of nothing for the latter
def test_a_folder_with_only_a_config_has_no_time_and_says_why(model_type: str, tmp_path: pathlib.Path) -> None:
    config = json.loads((jobs.MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    path = jobs.spec_of(tmp_path, model=str(tmp_path))
    report = planned(path, "--gpu", "a100-80")
    assert report["job"] is None
    assert "name a tokenizer in model.tokenizer" in report["notes"][-1]
    assert report["choice"] and "rows and time" in report["notes"][-1]
    with_time = planned(path, "--gpu", "a100-80", "--rows", "1000")["notes"][-1]
    assert "and time" not in with_time and with_time.endswith("the lengths that the choice assumes")
    if model_type == "llama":
        of_job = planned(path, "--gpu", "a100-80", "--set", f"model.tokenizer={jobs.MODEL}")["job"]
        assert of_job["num_rows"] == jobs.num_fewer
        assert planned(str(tmp_path / "config.json"), "--gpu", "a100-80")["choice"]


def test_rows_that_all_fail_are_explained(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "prompt": "", "language": "en"}\n')
    report = planned(jobs.spec_of(tmp_path, input={"path": str(rows)}), "--gpu", "a100-80")
    assert report["job"] is None
    assert "; the first: empty_prompt: " in report["notes"][-1]


def test_a_gpu_that_is_named_twice_is_shown_once() -> None:
    report = batchinf.plan(str(jobs.MODEL), gpu=["h100", "h200", "h100-80", "H200"])
    assert [plan.gpu.name for plan in report.gpus] == ["h100-80", "h200"]


def test_the_table_is_straight_and_fits_80_columns(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path)
    report = make_plan(str(path), (), PlanOptions(price=2.0))
    lines = list(report.lines())
    [start] = [number for number, line in enumerate(lines) if line.startswith("GPU ")]
    table = lines[start : start + 1 + len(report.gpus)]
    assert [line.split()[0] for line in table] == ["GPU", *(plan.gpu.name for plan in report.gpus)]
    assert max(map(len, table)) <= 80
    places = {line.index("GiB" if number == 0 else f"{report.gpus[number - 1].gpu.memory_bytes / GIB:.1f}")
              for number, line in enumerate(table)}  # fmt: skip
    assert len(places) == 1
    assert f"{jobs.num_fewer} rows read" not in "".join(lines)
    assert any(line.startswith("  prompts of ") for line in lines)
    assert ", the least memory of 15 kinds that hold the model: " in report.choice


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((str(jobs.MODEL), "--gpu", "h10"), "--gpu: got 'h10', which is not known; near: h100"),
        ((str(jobs.MODEL), "--gpu", "l4:3g"), "MIG parts are 1g"),
        (("./no/such/model",), "no/such/model'; a Hugging Face id would be"),
    ],
)
def test_wrong_inputs_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = jobs.run("plan", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--free", "inf"), ("--gpus", "1000000"), ("--nodes", "100000000"), ("--output-tokens", "inf")],
)
def test_numbers_that_no_machine_has_are_refused(option: str, value: str) -> None:
    done = jobs.run("plan", jobs.MODEL, "--gpu", "h200", option, value)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr


@pytest.mark.parametrize(
    "wanted", [{"nodes": 0}, {"gpus": -1}, {"context": -5}, {"free_gib": float("nan")}, {"free_gib": float("inf")}]
)
def test_numbers_that_make_no_plan_are_refused_in_python(wanted: dict[str, Any]) -> None:
    [(name, number)] = wanted.items()
    with pytest.raises(UserError, match=f"{name}: got {number}; must be a number of at least "):
        batchinf.plan(str(jobs.MODEL), **wanted)


def test_one_gpu_is_a_text_in_python() -> None:
    assert [plan.gpu.name for plan in batchinf.plan(str(jobs.MODEL), gpu="l4").gpus] == ["l4"]


def test_more_context_than_the_config_allows_is_a_warning(tmp_path: pathlib.Path) -> None:
    config = json.loads((jobs.MODEL / "config.json").read_text())
    most = config["max_position_embeddings"]
    assert not make_plan(str(jobs.MODEL), (), PlanOptions(gpus=("l4",), context=most)).notes
    [note] = make_plan(str(jobs.MODEL), (), PlanOptions(gpus=("l4",), context=most + 1)).notes
    assert note.startswith(f"warning: --context {most + 1:,} is more than the {most:,} tokens")
    path = jobs.spec_of(tmp_path, scripted=None, engine={"max_model_len": most + 1})
    words = f"engine.max_model_len {most + 1:,} is more than the {most:,} tokens"
    assert any(words in note for note in make_plan(str(path), (), PlanOptions(gpus=("l4",))).notes)
    assert words in jobs.run("validate", path).stdout
    other = {"engine.hf_overrides": {"max_position_embeddings": 2 * most}}
    assert not any("is more than" in note for note in make_plan(str(path), other, PlanOptions(gpus=("l4",))).notes)


def test_a_quantization_that_is_no_object_is_one_line_or_none(tmp_path: pathlib.Path) -> None:
    config = json.loads((jobs.MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": "fp8"}))
    assert "Traceback" not in jobs.run("plan", tmp_path, "--gpu", "h200").stderr


def test_a_config_without_the_fields_says_what_is_unknown(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a new one"}))
    done = jobs.run("plan", str(tmp_path), "--gpu", "h200", "--context", "512")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" …")]  # of slow steps
    assert len(lines) == 1 and "a new one" in lines[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [((403, {"X-Error-Code": "GatedRepo"}), "'org/model' is gated; accept its licence at "),
     (None, "the hub cannot be reached (")],
)  # fmt: skip
def test_a_gated_model_and_a_hub_that_does_not_answer(
    answer: tuple[int, dict[str, str]] | None, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server.serving(tmp_path, monkeypatch) as server:
        if answer is None:
            server.shutdown()
            server.server_close()
        else:
            server.refusals["org/model"] = answer
        with pytest.raises(UserError) as raised:
            make_plan("org/model", (), PlanOptions(gpus=("h200",)))
    assert raised.value.exit_code == 2
    assert str(raised.value).startswith("model.name: ") and words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("; or give a config.json: `plan` needs no other file of the model")


@pytest.mark.usefixtures("quick_vllm_replicas")  # another process builds the model with PyTorch
def test_a_config_without_heads_is_one_line(tmp_path: pathlib.Path) -> None:
    config = json.loads((jobs.MODEL / "config.json").read_text())
    place = model_folder(tmp_path / "model", {**config, "model_type": "unheard_of", "num_attention_heads": None})
    with pytest.raises(UserError) as raised:
        make_plan(str(place), (), PlanOptions(gpus=("h200",)))
    assert "unheard_of" in str(raised.value) and "\n" not in str(raised.value)


def test_plan_imports_neither_pytorch_nor_vllm(tmp_path: pathlib.Path) -> None:
    code = (
        "import atexit, sys; from batchinf.cli import main\n"
        "atexit.register(lambda: print('imported', *sorted({'torch', 'vllm'} & sys.modules.keys()), file=sys.stderr))\n"
        "main()"
    )
    path = jobs.spec_of(tmp_path, engine={"max_model_len": "auto"})
    command = [sys.executable, "-c", code, "plan", str(path), "--gpu", "h200"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=jobs.ROOT,
                          env={**os.environ, **jobs.quick_start()})  # fmt: skip
    assert done.stderr.strip().splitlines()[-1] == "imported"
    assert "choice: 2 × H200 SXM: tensor 1 × data 2" in done.stdout


def test_a_large_file_is_sampled_and_not_scanned(tmp_path: pathlib.Path) -> None:
    number, rng = 200_000, np.random.default_rng(0)
    lengths = np.minimum(2000, rng.lognormal(5.9, 0.5, number)).astype(int)
    text = "".join(map(chr, rng.integers(97, 123, 4000)))
    rows = {"prompt": [text[: int(length)] + str(i) for i, length in enumerate(lengths)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=20_000, compression="none")
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in rows["prompt"])
    mean = sum(map(len, rows["prompt"])) / number
    for name in ("rows.parquet", "rows.jsonl"):
        to = tmp_path / name.replace(".", "-")
        to.mkdir()
        found = sample_input(InputLocation(str(tmp_path / name)), to)
        assert found == pytest.approx(number, rel=0.1)
        [copy] = to.iterdir()
        assert copy.stat().st_size < 2_000_000
        read = (
            pq.read_table(copy)["prompt"].to_pylist()
            if name.endswith("parquet")
            else [json.loads(line)["prompt"] for line in copy.read_text().splitlines()]
        )
        assert set(read) <= set(rows["prompt"])
        assert sum(map(len, read)) / len(read) == pytest.approx(mean, rel=0.1)
    assert sample_input(InputLocation(str(jobs.PROMPTS)), tmp_path) is None
