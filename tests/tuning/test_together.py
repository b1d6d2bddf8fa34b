"""In a trial, all replicas begin together: judged by the order of its events and by who wrote which rows."""

import contextlib
import pathlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest

import jobs
from batchinf import api
from batchinf.base.errors import Interrupted, UserError
from batchinf.base.storage import Folder
from batchinf.manifest.events import read_events
from batchinf.tuning import tune
from batchinf.tuning.trial import TuneTrial, run_trial

pytestmark = pytest.mark.usefixtures("quick_replicas")

NUM_ROWS = 60


class Tuned:
    """A tuned job whose engines are held at their start as faults say, and the facts of its first trial.

    events: their names, in order, with the replica where there is one. rows: by the replica that wrote them. attempts:
    of all rows.
    """

    def __init__(self, folder: pathlib.Path, faults: str, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
        self.path, self.trial = spec_of(folder, **sections), folder / "out-tune" / "trial"
        (folder / "once").mkdir()
        self.environment = {"BATCHINF_FAULTS": faults, "BATCHINF_FAULTS_ONCE": str(folder / "once")}
        self._monkeypatch = monkeypatch
        self.events: list[tuple[str, int | None]] = []
        self.rows: Counter[int] = Counter()
        self.shares: tuple[int, ...] = ()
        self.attempts: set[int] = set()

    def run(self) -> TuneTrial:
        """Tune it. Returns the first trial."""
        for name, value in self.environment.items():
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.setattr(tune, "run_trial", self._run_trial)
        report = api.tune(self.path, num_rows=NUM_ROWS, tries=["input.order=prefix"], say=lambda _: None)
        return report.trials[0]

    def _run_trial(self, settings: Any, sample: Any, *, run: Any, **options: Any) -> TuneTrial:
        def run_and_look(settings: Mapping[str, Any]) -> Any:
            summary = run(settings)
            if not self.events:
                self._look()
            return summary

        return run_trial(settings, sample, run=run_and_look, **options)

    def _look(self) -> None:
        state = jobs.state_of(self.trial)
        self.events = [(event.name, event.fields.get("replica")) for event in read_events(Folder(self.trial))]
        for part in state.parts.values():
            self.rows[part.replica] += part.num_rows
        # A part may have rows that other replicas ran.
        self.shares = () if state.speed is None else tuple(share.num_rows for share in state.speed.replicas)
        self.attempts = {row["attempts"] for row in jobs.table_of(self.trial).select(["attempts"]).to_pylist()}

    def place(self, name: str, replica: int | None = None) -> int:
        """Of the first such event."""
        return next(
            place for place, event in enumerate(self.events) if event[0] == name and replica in (None, event[1])
        )

    def is_one_waiting(self) -> bool:
        """Whether the first trial has a replica that is up, and another that is held at its start."""
        replicas = jobs.snapshot_of(self.trial).get("replicas", ())
        return [replica["state"] for replica in replicas].count("running") == 1


def spec_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    # Each engine could take all rows at once, and the first one up would.
    return jobs.spec_of(folder, output={"rows_per_shard": 10}, scripted={"max_num_seqs": 64}, **sections)


@contextlib.contextmanager
def beside(action: Callable[[], object], held: pathlib.Path) -> Iterator[None]:
    """Run an action on another thread. At its end the engine that `held` holds goes on. An error fails the test."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
        held.unlink(missing_ok=True)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(150)
    assert not errors, errors


def test_replicas_of_a_trial_begin_together_and_share_its_rows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    tuned = Tuned(tmp_path, f"engine.start=hold {held}", monkeypatch)

    def release() -> None:
        jobs.wait_until(lambda: held.exists() and tuned.is_one_waiting())

    with beside(release, held):
        trial = tuned.run()
    assert not trial.error
    ready = [tuned.place("ready", replica) for replica in (0, 1)]
    assert max(ready) < tuned.place("first_request") < tuned.place("all_committed")
    assert trial.late_s > 0
    # Both have rows, so that the rate is that of two. How many depends on how much of a busy machine each gets.
    assert tuned.rows.total() == NUM_ROWS
    assert sum(tuned.shares) == NUM_ROWS
    assert len(tuned.shares) == 2
    assert min(tuned.shares) > 0
    assert tuned.attempts == {1}


def test_a_normal_job_begins_with_the_first_engine(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    spec = spec_of(tmp_path, input={"limit": NUM_ROWS})
    # The other one is held until the job has ended.
    jobs.finish(spec, faults=f"engine.start=hold {tmp_path / 'held'}", BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    assert len(jobs.events_of(tmp_path / "out", "ready")) == 1
    assert len({part.replica for part in jobs.state_of(tmp_path / "out").parts.values()}) == 1


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_replica_that_fails_at_its_start_does_not_hang_the_trial(
    max_restarts: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = Tuned(tmp_path, "engine.start=raise 5", monkeypatch, max_restarts=max_restarts)
    trial = tuned.run()
    assert not trial.error
    assert tuned.rows.total() == NUM_ROWS
    assert tuned.attempts == {1}


def test_a_trial_in_which_no_replica_comes_up_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned(tmp_path, "engine.start:*=raise 5", monkeypatch, max_restarts=1)
    with pytest.raises(UserError, match="the spec as it is cannot run: no replica is left"):
        tuned.run()


def test_a_replica_that_dies_while_it_waits_comes_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    tuned = Tuned(tmp_path, f"engine.start=hold {held}", monkeypatch)

    def kill_and_release() -> None:
        jobs.wait_until(lambda: held.exists() and held.read_text() and tuned.is_one_waiting())
        starting = int(held.read_text())
        [waiting] = [one for one in jobs.replicas_of(psutil.Process().pid) if one.pid != starting]
        jobs.kill([waiting])
        jobs.wait_until(lambda: any(r["restarts"] for r in jobs.snapshot_of(tuned.trial).get("replicas", ())))

    with beside(kill_and_release, held):
        trial = tuned.run()
    assert not trial.error
    assert tuned.rows.total() == NUM_ROWS
    assert tuned.attempts == {1}
    ended = tuned.place("replica_ended")
    assert ended < tuned.place("first_request")
    assert not [event for event in tuned.events if event[0] == "death"]


def test_a_stop_while_replicas_wait(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned(tmp_path, f"engine.start=hold {tmp_path / 'held'}", monkeypatch)
    faults = tuned.environment.pop("BATCHINF_FAULTS")
    tries = ("--rows", str(NUM_ROWS), "--try", "input.order=prefix")
    process = jobs.start("tune", tuned.path, *tries, faults=faults, **tuned.environment)
    jobs.wait_until(tuned.is_one_waiting)
    process.send_signal(signal.SIGINT)
    code, _, errors = jobs.end(process)
    assert code == Interrupted.exit_code, errors
    assert not tuned.trial.exists()
