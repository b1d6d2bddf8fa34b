"""`output.push_to_hub`: whole jobs whose rows go to a stand-in for the hub when they are done."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import stores
from hub_server import TOKEN, Hub, as_parquet, listening, serving

import batchinf
import jobs
from batchinf import cli
from batchinf.base.errors import UserError
from batchinf.base.storage import Folder
from batchinf.manifest.names import other_names

pytestmark = pytest.mark.fewer_rows
NAME = "me/answers"
KEY = f"datasets/{NAME}"
COMMIT = f"/api/{KEY}/commit/main"


@pytest.fixture(scope="module")
def one_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub, and the environment of the processes that use it, which a server forks."""
    with listening() as hub:
        environment = hub.environment(tmp_path_factory.mktemp("hub"))
        with jobs.own_server(**environment):
            yield hub, environment


@pytest.fixture
def environment(one_hub: tuple[Hub, dict[str, str]]) -> dict[str, str]:
    shutil.rmtree(one_hub[1]["HF_HOME"], ignore_errors=True)
    return one_hub[1]


@pytest.fixture
def hub(one_hub: tuple[Hub, dict[str, str]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Has the prompts as the dataset me/prompts."""
    with serving(tmp_path, monkeypatch, one_hub[0]) as hub:
        hub.add_dataset("me/prompts", {"data/train-00000-of-00001.parquet": as_parquet(jobs.prompts())})
        yield hub


def spec_of(folder: pathlib.Path, sections: Mapping[str, Any] = MappingProxyType({}), **output: Any) -> pathlib.Path:
    one = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
    return jobs.spec_of(folder, output={"push_to_hub": NAME, **output}, **one, **sections)


def assert_no_token(*folders: pathlib.Path) -> None:
    for folder in folders:
        for path in folder.rglob("*"):
            assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


def assert_refused(ended: "subprocess.CompletedProcess[str]", words: str) -> None:
    assert ended.returncode == 2, ended.stderr
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.stderr.endswith(f"{error}\n") and words in error


@dataclass
class Held:
    """A fault of the hub: the first request with this method and an end of its path waits until it is let go."""

    method: str
    end: str
    has_come: threading.Event = field(default_factory=threading.Event)
    may_go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, method: str, path: str) -> str:
        if self.has_come.is_set() or method != self.method or self.end not in path:
            return ""
        self.has_come.set()
        self.may_go.wait(60)
        return "cut"


def test_from_a_dataset_to_a_dataset(hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, {"input": {"path": "me/prompts"}})
    hub.fault = lambda method, path: "500" if path == COMMIT else ""
    failed = jobs.run("run", spec, **environment)
    assert_refused(
        failed, "output.push_to_hub: the hub answered with status 500; the job is done, and its output is in"
    )
    assert "run the same command again to push it" in failed.stderr and [*hub.files(NAME)] == [".gitattributes"]
    hub.fault = lambda method, path: ""
    done = jobs.finish(spec, **environment)
    assert f"was already done: {jobs.num_fewer} output rows" in done.stdout
    assert f"pushed to the hub: {hub.url}/{KEY}" in done.stdout
    assert hub.rows(NAME) == list(jobs.unhurt()) and hub.visibility[KEY] == "private"

    card = hub.files(NAME)["README.md"].decode()
    job_id = batchinf.open(tmp_path / "out").job_id
    invented = "| answers | invented by the scripted engine |"
    assert "(its answers are invented: the spec has `scripted`)" in done.stdout
    facts = invented, f"| model | `{jobs.MODEL}`", f"| rows | {jobs.num_fewer} |"
    for words in (*facts, "tokens/s in its last run", "batchinf 0.1", job_id):
        assert words in card
    assert "repository: me/answers" in card and "path: me/prompts" in card

    hub.asked.clear()
    assert "the hub has these rows already: me/answers" in jobs.finish(spec, **environment).stdout
    assert COMMIT not in hub.asked
    assert not (tmp_path / "out" / "hub").exists()
    assert_no_token(tmp_path / "out")
    assert TOKEN not in str(hub.commits)


@pytest.mark.slow
def test_rows_that_ran_again_are_pushed_again(hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    jobs.finish(spec, **environment)
    jobs.finish(spec, "--retry", "row_index = 3", "--set", "sampling.max_tokens=4", **environment)
    assert len(hub.rows(NAME)) == len(jobs.unhurt())
    assert len(hub.rows(NAME)[3]["token_ids"]) <= 4 < len(jobs.unhurt()[3]["token_ids"])


@pytest.mark.slow
def test_a_push_stops_on_ctrl_c(hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    hub.fault = held = Held("POST", COMMIT)
    process = jobs.start("run", spec, **environment)
    assert held.has_come.wait(120)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75 and "run the same command again to go on" in errors
    held.may_go.set()
    assert [*hub.files(NAME)] == [".gitattributes"] and not (tmp_path / "out" / "hub").exists()
    jobs.finish(spec, **environment)
    assert hub.rows(NAME) == list(jobs.unhurt())


def killed(hub: Hub, spec: pathlib.Path, held: Held, environment: Mapping[str, str]) -> None:
    """Kill a run while the hub holds a request of its push; the process that pushes ends, too."""
    hub.fault = held
    process = jobs.start("run", spec, **environment)
    assert held.has_come.wait(120)
    [pusher] = jobs.family(process.pid)[:-1]
    process.kill()
    jobs.end(process)
    pusher.wait(10)
    held.may_go.set()


PLACES = [
    pytest.param("POST", COMMIT),
    pytest.param("POST", "/preupload/main", marks=pytest.mark.slow),
    pytest.param("PUT", "/lfs/", marks=pytest.mark.slow),
    pytest.param("POST", "/api/repos/create", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "end"), PLACES)
def test_a_push_that_is_killed_runs_again(
    method: str, end: str, hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = spec_of(tmp_path)
    if end == "/api/repos/create":  # before the job begins
        hub.fault = held = Held(method, end)
        process = jobs.start("run", spec, **environment)
        assert held.has_come.wait(120)
        process.kill()
        jobs.end(process)
        held.may_go.set()
    else:
        killed(hub, spec, Held(method, end), environment)
        assert [*hub.files(NAME)] == [".gitattributes"]
    if end == COMMIT:  # without a further push, the next run deletes what the killed one has left
        assert (tmp_path / "out" / "hub").exists() and other_names(Folder(tmp_path / "out")) == []
        jobs.finish(spec, "--set", "output.push_to_hub=null", **environment)
        assert not (tmp_path / "out" / "hub").exists()
    jobs.finish(spec, **environment)
    assert hub.rows(NAME) == list(jobs.unhurt())
    assert not (tmp_path / "out" / "hub").exists()


@pytest.mark.slow
def test_an_answer_that_is_lost_after_the_commit(hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, push_to_hub={"repository": NAME, "public": True})
    hub.fault = lambda method, path: "cut after" if path == COMMIT else ""
    assert_refused(jobs.run("run", spec, **environment), "run the same command again to push it")
    assert hub.rows(NAME) == list(jobs.unhurt()) and hub.visibility[KEY] == "public"
    hub.fault = lambda method, path: ""
    assert "the hub has these rows already" in jobs.finish(spec, **environment).stdout


@pytest.mark.slow
def test_a_dataset_that_another_one_takes_while_the_job_runs(
    hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = spec_of(tmp_path)

    def fault(method: str, path: str) -> str:
        if path.endswith("/preupload/main"):
            hub.add_dataset(NAME, {"theirs.csv": b"x"})
        return ""

    hub.fault = fault
    assert_refused(jobs.run("run", spec, **environment), "the hub answered with status 412")
    assert_refused(jobs.run("run", spec, **environment), "has 'theirs.csv', which this job has not pushed")
    assert [*hub.files(NAME)] == [".gitattributes", "theirs.csv"]
    hub.fault = lambda method, path: ""
    more = {"repository": NAME, "overwrite": True, "split": "test"}
    jobs.finish(spec_of(tmp_path, push_to_hub=more), **environment)
    assert hub.rows(NAME) == list(jobs.unhurt()) and "data/test-00000-of-00001.parquet" in hub.files(NAME)


@pytest.mark.slow
def test_a_job_in_a_bucket(
    hub: Hub, environment: dict[str, str], url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    environment = {**environment, **store.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    spec = stores.spec_of(tmp_path, url, output={"push_to_hub": NAME})
    killed(hub, spec, Held("PUT", "/lfs/"), environment)
    stores.lose_host(tmp_path)
    done = jobs.finish(spec, **environment)
    assert hub.rows(NAME) == list(jobs.unhurt()) and "pushed to the hub" in done.stdout
    assert_no_token(tmp_path / "cache")
    for folder in ("commits", "journal", "parts", "telemetry"):
        names = stores.names(url, folder)
        assert not any(TOKEN.encode() in stores.read(f"{url}/{folder}", name) for name in names)
    assert TOKEN.encode() not in stores.read(url, "job.yaml") + stores.read(url, "status.json")


@pytest.mark.slow
def test_a_job_with_too_many_errors_or_without_rows_pushes_nothing(
    hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": ""}\n{"prompt": "a"}\n')
    where = {"path": str(rows), "id_column": None}
    output = {"keep_columns": [], "push_to_hub": NAME}
    spec = jobs.spec_of(tmp_path, input=where, output=output, scripted={"step_s": 0.0}, max_error_rate=0.4)
    ended = jobs.run("run", spec, **environment)
    assert ended.returncode == 3 and "; nothing is pushed to me/answers" in ended.stderr
    rows.write_text("")
    empty = jobs.finish(spec, "--set", f"output.path={tmp_path / 'empty'}", **environment)
    assert "nothing is pushed to me/answers" in empty.stdout
    assert [*hub.files(NAME)] == [".gitattributes"]


OTHER_CARD = b"---\n---\n<!-- batchinf job=0123 rows=1 split=train -->\n"
IS_PUBLIC = f"the dataset {NAME} is public, so all could read the rows; make it private, or write public: true"
MAY_NOT = f"the hub does not let this machine's token write to {NAME} (403); run `hf auth login`"
REFUSED: list[tuple[str, Any, str]] = [
    ("foreign", NAME, f"the dataset {NAME} has 'README.md', which this job has not pushed; give another name, or write "
     "overwrite: true to replace its data and card"),
    ("public", NAME, IS_PUBLIC),
    ("public", {"repository": NAME, "overwrite": True}, IS_PUBLIC),
    ("read only", NAME, MAY_NOT),
    ("no right", NAME, MAY_NOT),
    ("no token", NAME, "no token of the hub is here; set HF_TOKEN or run `hf auth login`"),
    ("offline", NAME, "HF_HUB_OFFLINE is set; unset it"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "push", "words"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_refused_before_any_row_runs(
    state: str,
    push: Any,
    words: str,
    hub: Hub,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    if state == "foreign":
        hub.add_dataset(NAME, {"README.md": OTHER_CARD})
    elif state == "public":
        hub.add_dataset(NAME, {}, "public")
    elif state == "read only":
        hub.add_dataset(NAME, {})
        hub.read_only.add(KEY)
    elif state == "no right":
        hub.refusals[KEY] = (403, {})
    elif state == "no token":
        monkeypatch.delenv("HF_TOKEN")
    elif state == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", ["batchinf", "run", str(spec_of(tmp_path, push_to_hub=push))])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert capsys.readouterr().err == f"error: output.push_to_hub: {words}; no engine has started\n"
    assert ended.value.code == 2 and not (tmp_path / "out").exists()


def test_slices_do_not_push(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^output.push_to_hub: got it with --slice 0/2; leave it out") as refused:
        batchinf.run(spec_of(tmp_path), slice="0/2")
    exports = f"batchinf export {tmp_path / 'out'} --to hf -o FOLDER"
    assert f"{exports} && hf upload me/answers FOLDER . --repo-type dataset --private" in str(refused.value)


@pytest.mark.slow
def test_a_new_job_in_the_folder_of_another_one_is_refused_first(
    hub: Hub, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = spec_of(tmp_path)
    jobs.finish(spec, **environment)
    before = {*os.listdir(tmp_path)}
    assert_refused(jobs.run("run", spec, "--fresh", **environment), "which this job has not pushed")
    assert {*os.listdir(tmp_path)} == before  # the old job keeps its name
