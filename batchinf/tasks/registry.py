"""All tasks by name. Importing this module adds them to the job spec. `register` takes a new task as an argument."""

from collections.abc import Mapping
from typing import Any

from batchinf.spec.job import JobSpec, add_tasks
from batchinf.tasks.base import Task
from batchinf.tasks.generate.task import Generate
from batchinf.tasks.logits.task import Logits
from batchinf.tasks.score.task import Score
from batchinf.tasks.vectors.rerank import Rerank
from batchinf.tasks.vectors.task import Classify, Embed, HiddenStates, Reward

# By name, in the order in which they were registered.
TASKS: dict[str, type[Task]] = {}


def register(*tasks: type[Task]) -> None:
    """Add tasks, so that specs can name them. The very first one is the default."""
    TASKS.update((task.name, task) for task in tasks)
    add_tasks((task.name, task.section) for task in tasks)


def stored_task(spec: Mapping[str, Any]) -> type[Task]:
    """The task that a job's stored spec names."""
    return TASKS[spec.get("task", Generate.name)]


def task_type(spec: JobSpec) -> type[Task]:
    """The class of the task that a spec names."""
    return TASKS[spec.task]


def task_of(spec: JobSpec) -> Task:
    """The task that a spec names, over this spec."""
    return TASKS[spec.task](spec)


def task_of_url(url: str | None) -> str | None:
    """The name of the first task that runs lines of a batch file with this URL; None if none does."""
    return next((name for name, task in TASKS.items() if url in task.batch_urls), None)


_BUILT_IN = (Generate, Score, Logits, Embed, Classify, Reward, HiddenStates, Rerank)
register(*_BUILT_IN)
