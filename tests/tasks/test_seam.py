"""The seam of the tasks: no code outside `tasks/` knows a task, and a new task is one class and one line."""

import ast
import functools
import json
import os
import pathlib
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

import batchinf
import jobs
from batchinf.spec.job import JobSpec
from batchinf.tasks import registry

PACKAGE = pathlib.Path(batchinf.__file__).parent
MODULES = sorted(
    path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if PACKAGE / "tasks" not in path.parents
)
OF_TASKS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("tasks/**/*.py"))
SECTIONS = {task.section.name for task in registry.TASKS.values() if task.section is not None}
NAMES = set(registry.TASKS)
# The folders of single tasks, or of several alike.
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("tasks/*/__init__.py"))
# Texts that are a task's name by chance, by the module that has them.
CHANCE = {
    ("model/lora.py", "score"),  # a layer
    ("export/openai_batch.py", "score"),  # in the form of answers
    ("commands/run_batch.py", "embed"),  # values of vLLM's flag --convert
    ("commands/run_batch.py", "classify"),
    ("report/samples.py", "score"),  # a column
    ("commands/verify.py", "logits"),
}

COUNT = '''
"""A task of one class: it stores how many tokens a prompt has, times a factor."""

from typing import Annotated

import pyarrow as pa

from batchinf.records import Request
from batchinf.spec.fields import IDENTITY, Positive, Section, wrong
from batchinf.spec.job import TaskSection
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import register


class CountSpec(Section):
    """How tokens are counted."""

    factor: Annotated[Positive, IDENTITY] = 1
    """Every count is multiplied by this number."""


def check(spec):
    if spec.task != "count" and spec.count != CountSpec():
        raise wrong("must be left out", "count")


class Count(Task):
    name = "count"
    section = TaskSection("count", CountSpec, CountSpec(), check)

    def expand(self, prompt, max_model_len):
        return [Request(prompt.row_index, 0, prompt.token_ids, SamplingSpec(temperature=0.0))]

    def result_fields(self):
        return [("num_tokens", pa.int32())]

    def encode(self, results):
        counts = [None if result.completion is None else len(result.prompt.token_ids) for result in results]
        numbers = [None if n is None else n * self.spec.count.factor for n in counts]
        return self.result_batch(results, {"num_tokens": pa.array(numbers, pa.int32())})


register(Count)
'''


def _last_name(value: ast.expr) -> str:
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""


@functools.cache
def nodes_of(code: str) -> list[ast.AST]:
    """All nodes of the code. Two tests read those of all modules."""
    return [*ast.walk(ast.parse(code))]


def code_of(name: str) -> str:
    return (PACKAGE / name).read_text(encoding="utf-8")


def knowledge(code: str) -> Iterator[str]:
    """What code knows of the tasks: it reads the task of a spec, or a task's section, or has a task's name."""
    for node in nodes_of(code):
        if isinstance(node, ast.Attribute) and node.attr in {"task", *SECTIONS}:
            if _last_name(node.value).endswith("spec"):
                yield f"{_last_name(node.value)}.{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.value


def test_no_module_outside_knows_a_task() -> None:
    found = {(name, known) for name in MODULES for known in knowledge(code_of(name))}
    assert found - CHANCE == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("job.spec.task", ["spec.task"]),
        ("self._spec.pooling", ["_spec.pooling"]),
        ("a = spec.logits.width", ["spec.logits"]),
        ("x == 'score'", ["score"]),
        ("{'reward': 1}", ["reward"]),
        ("task_of(spec).name, job.task, 'text'", []),
    ],
)
def test_the_rule_sees_what_it_forbids(code: str, found: list[str]) -> None:
    assert [*knowledge(code)] == found


def imported(code: str) -> Iterator[str]:
    """The modules that code imports, and the names in them."""
    for node in nodes_of(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folders_of_tasks(code: str) -> set[str]:
    """The folders of tasks that code imports from."""
    names = (name.split(".") for name in imported(code))
    return {name[2] for name in names if name[:2] == ["batchinf", "tasks"] and name[2:] and name[2] in FOLDERS}


def test_no_module_outside_imports_from_a_tasks_folder() -> None:
    found = {(name, folder) for name in MODULES for folder in folders_of_tasks(code_of(name))}
    assert found == set()


@pytest.mark.parametrize("name", OF_TASKS)
def test_no_tasks_folder_imports_from_another(name: str) -> None:
    folder = pathlib.Path(name).parent.name
    allowed = {folder} & {*FOLDERS} if name != "tasks/registry.py" else {*FOLDERS}
    assert folders_of_tasks(code_of(name)) <= allowed


@pytest.mark.parametrize(
    ("code", "folders"),
    [
        ("from batchinf.tasks.score.accuracy import ANSWER", {"score"}),
        ("def late():\n    import batchinf.tasks.logits.task", {"logits"}),
        ("from batchinf.tasks import vectors", {"vectors"}),
        ("from batchinf.tasks.base import Task\nimport batchinf.tasks.registry", set()),
    ],
)
def test_the_rule_of_imports_sees_what_it_forbids(code: str, folders: set[str]) -> None:
    assert folders_of_tasks(code) == folders


@pytest.mark.slow
def test_a_new_task_is_one_class_and_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "site").mkdir()
    # Imported by each process when it starts, those of the replicas too.
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNT)
    environment = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{jobs.quick_start()['PYTHONPATH']}"}
    one = {"data_parallel_size": 1}
    path = jobs.spec_of(tmp_path, task="count", count={"factor": 3}, sampling=None, parallel=one)
    done = jobs.finish(path, **environment)
    assert "task: count" in done.stderr + done.stdout
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    prompts = [json.loads(line)["prompt"] for line in jobs.prompts().read_text().split("\n") if line]
    rows = sorted(jobs.rows_of(tmp_path / "out"), key=lambda row: row["row_index"])
    assert [row["num_tokens"] for row in rows] == [3 * len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert all(row["error_type"] is None for row in rows)

    for command in ("validate", "status", "check", "head"):
        asked = jobs.run(command, path if command == "validate" else tmp_path / "out", **environment)
        assert asked.returncode == 0, f"{command}: {asked.stderr}"
    compared = jobs.run("diff", tmp_path / "out", tmp_path / "out", **environment)
    assert compared.returncode == 2 and "no column that decides whether a row has changed" in compared.stderr
    schema = json.loads(jobs.run("schema", **environment).stdout)["properties"]
    assert schema["task"]["enum"][-1] == "count" and "count" in schema
    other = jobs.run("run", path, "--set", "task=generate", **environment)
    assert other.returncode == 2 and "job.yaml:" in other.stderr and "count: must be left out" in other.stderr
    assert "count" not in JobSpec.model_fields, "this process has not registered it"
