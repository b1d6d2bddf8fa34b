"""A run order of its own: held against plain sorting, and through whole jobs that are hurt, extended and cut."""

import itertools
import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.storage import Folder
from batchinf.job import ordering
from batchinf.job.ordering import prefix_key, shared_bytes, shared_in_order, shared_when_sorted, sort_rows
from batchinf.schedule.positions import RunOrder, positions_name
from batchinf.schedule.shards import shard_at, total_shards

NUM_GROUPS, GROUP_ROWS = 40, 6
ONE_REPLICA = {"data_parallel_size": 1}


# -- the parts of it ---------------------------------------------------------------------------------------------------


def text(chance: random.Random, num_bytes: int) -> bytes:
    return bytes(chance.choices(b"abcdefgh", k=num_bytes))


@pytest.mark.parametrize("common", [0, 64, 4096, 20_480, 200_704])
def test_keys_say_how_much_two_prompts_share(common: int) -> None:
    chance = random.Random(common)
    start = text(chance, common)
    one, other = (prefix_key(start + text(chance, 5000)) for _ in range(2))
    assert shared_bytes(one, other) == common
    assert len(one) < 1800


def test_sorted_keys_have_each_group_together_however_long_what_all_share() -> None:
    chance = random.Random(1)
    system = text(chance, 10_000)
    groups = [system + text(chance, 900) for _ in range(30)]
    prompts = [(group, groups[group] + text(chance, 300)) for group in range(30) for _ in range(5)]
    chance.shuffle(prompts)
    in_order = [group for _, group in sorted((prefix_key(prompt), group) for group, prompt in prompts)]
    assert all(len(set(in_order[i : i + 5])) == 1 for i in range(0, 150, 5))
    keys = [prefix_key(prompt) for _, prompt in prompts]
    # All but the first of all have the system prompt, all but the first of a group the group's own text.
    assert shared_when_sorted(keys) >= 149 * 9_900 + 120 * 700
    assert shared_in_order(keys) == shared_when_sorted(keys)


def test_rows_are_sorted_out_of_core_as_in_memory(tmp_path: pathlib.Path) -> None:
    chance = random.Random(2)
    keys = [None if chance.random() < 0.1 else bytes(chance.choices(b"ab", k=chance.randrange(6))) for _ in range(5000)]
    batches = [(np.arange(start, min(start + 700, 5000)), keys[start : start + 700]) for start in range(0, 5000, 700)]
    found, dealt = (
        np.concatenate(list(sort_rows(Folder(tmp_path), batches, *dealing))).tolist() for dealing in ((), (3, 4))
    )
    in_order = sorted(range(5000), key=lambda row: (keys[row] is None, keys[row] or b"", row))
    assert found == in_order
    waves = [in_order[:1667], in_order[1667:3334], in_order[3334:]]
    assert dealt == [row for wave in waves for hand in range(4) for row in wave[hand::4]]
    assert list(tmp_path.rglob("*")) == [tmp_path / "selection"]


def grouped_texts(*, shuffled: bool) -> list[bytes]:
    chance = random.Random(3)
    groups = [text(chance, 600) for _ in range(400)]
    prompts = [group + text(chance, 200) for group in groups for _ in range(5)]
    if shuffled:
        chance.shuffle(prompts)
    return prompts


@pytest.mark.parametrize(
    ("made", "least", "most"),
    [
        (lambda: grouped_texts(shuffled=True), 0.3, 0.7),
        (lambda: grouped_texts(shuffled=False), 0.0, 0.01),  # the cache has them anyhow
        (lambda: [text(random.Random(i), 800) for i in range(2000)], 0.0, 0.0),
        (
            lambda: [bytes(700) + text(random.Random(i), 100) for i in range(2000)],
            0.0,
            0.02,
        ),  # one system prompt for all
        (list, 0.0, 0.0),
    ],
    ids=["shuffled", "in order", "unlike", "one prefix", "none"],
)
def test_auto_knows_what_sorting_would_save(made: Callable[[], list[bytes]], least: float, most: float) -> None:
    prompts = made()
    runs = [prompts[i : i + ordering.RUN_ROWS] for i in range(0, len(prompts), ordering.RUN_ROWS)]
    share, num_rows = ordering.saved_share(runs)
    assert least <= share <= most
    assert num_rows == len(prompts)


@pytest.mark.parametrize("num_rows", [1, 500, 501, 19_999, 20_001, 10**9])
def test_a_sample_is_runs_of_rows_that_there_are(num_rows: int) -> None:
    runs = ordering.sampled_runs(num_rows)
    assert all(0 <= start < stop <= num_rows for start, stop in runs)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(runs))
    assert sum(stop - start for start, stop in runs) == min(num_rows, ordering.SAMPLED_ROWS)


# -- whole jobs --------------------------------------------------------------------------------------------------------


def make_rows(first: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of groups that begin alike, shuffled."""
    chance = random.Random(seed)
    groups = ["".join(chance.choices("abcdefgh ", k=300)) for _ in range(NUM_GROUPS)]
    rows = [{"prompt": f"{groups[group]} {i}", "language": str(group), "budget": 1 + chance.randrange(30)}
            for group in range(NUM_GROUPS) for i in range(GROUP_ROWS)]  # fmt: skip
    chance.shuffle(rows)
    return [{"id": first + number, **row} for number, row in enumerate(rows)]


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]], *, broken: int = 0) -> None:
    lines = [json.dumps(row) for row in rows]
    # Broken ones first in the input, and last to run.
    path.write_text("\n".join(["{broken"] * broken + lines) + "\n")


def make_spec(folder: pathlib.Path, path: pathlib.Path, order: str, out: str = "out", **sections: Any) -> pathlib.Path:
    given = {"path": str(path), "id_column": "id", "order": order, **sections.pop("input", {})}
    output = {"path": str(folder / out), "keep_columns": ["language"], "rows_per_shard": 24}
    return jobs.spec_of(folder, **{"input": given, "output": output, "parallel": ONE_REPLICA, **sections})


def in_order(out: pathlib.Path) -> list[dict[str, Any]]:
    return sorted(jobs.rows_of(out), key=lambda row: row["row_index"])


def edges(out: pathlib.Path) -> int:
    """How often a group goes on in another part."""
    parts = [set(pq.read_table(path)["language"].to_pylist()) for path in sorted((out / "parts").glob("*.parquet"))]
    return sum(map(len, parts)) - len(set().union(*parts))


@pytest.mark.slow
def test_a_job_that_is_killed_extended_and_retried_in_an_order_of_its_own(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_rows(), broken=3)
    changes: dict[str, Any] = {"input": {"limit": 230}, "scripted": {"step_s": 0.002}}
    spec = make_spec(tmp_path, folder, "prefix", **changes, parallel={"data_parallel_size": 2})
    killed = jobs.start("run", spec)
    jobs.wait_until(lambda: list((tmp_path / "out" / "parts").glob("*.parquet")))
    everyone = jobs.family(killed.pid)
    jobs.kill(everyone[-1:])
    killed.communicate()
    assert jobs.are_gone(everyone)
    # What says the order is lost too, and made again; the rest goes on from there.
    os.unlink(tmp_path / "out" / positions_name(1))
    done = jobs.finish(spec, "--set", "max_error_rate=0.9")
    assert "ordering its rows again" in done.stderr
    assert edges(tmp_path / "out") <= 12
    assert jobs.state_of(tmp_path / "out").header.layout["order"] == "prefix"

    write_jsonl(folder / "b.jsonl", make_rows(1000, seed=1))
    jobs.finish(spec, "--extend", "--set", "input.limit=460", "--set", "max_error_rate=0.9")
    [first, second] = jobs.state_of(tmp_path / "out").extents
    assert None not in (first.positions, second.positions) and first.stop_row == second.first_row == 230
    retry = ("--retry", "id IN (4, 1004)", "--set", "sampling.max_tokens=5", "--set", "max_error_rate=0.9")
    jobs.finish(spec, "--set", "input.limit=460", *retry)
    checked = jobs.run("check", tmp_path / "out", "--deep")
    assert checked.returncode == 0, checked.stdout

    plain = make_spec(tmp_path, folder, "input", "plain", **{**changes, "input": {"limit": 460}})
    jobs.finish(plain, "--set", "max_error_rate=0.9")
    jobs.finish(plain, *retry)
    assert in_order(tmp_path / "out") == in_order(tmp_path / "plain") == jobs.rows_of(tmp_path / "plain")
    assert [row["row_index"] for row in jobs.rows_of(tmp_path / "out")] != list(range(460))
    # Those that cannot be read ran last of the first extent.
    shards = [index for index in range(total_shards([first])) if 0 in RunOrder(
        Folder(tmp_path / "out"), [first, second]).of(shard_at([first, second], index))]  # fmt: skip
    assert shards == [total_shards([first]) - 1]

    ours, theirs = (batchinf.open(tmp_path / name) for name in ("out", "plain"))
    assert ours.table(["row_index", "text"]).equals(theirs.table(["row_index", "text"]))
    for column in ("logprobs", "top_token_ids"):
        one, other = ours.ragged(column), theirs.ragged(column)
        assert np.array_equal(one.values, other.values, equal_nan=column == "logprobs")
        assert np.array_equal(one.offsets, other.offsets) and np.array_equal(one.is_null, other.is_null)
    assert "outputs: 0 of 460 changed" in jobs.run("diff", tmp_path / "out", tmp_path / "plain").stdout
    assert len(jobs.run("head", tmp_path / "out", "-n", "3").stdout.splitlines()) >= 3


@pytest.mark.slow
def test_slices_order_their_own_rows_and_a_choice_of_them(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(make_rows()), path)
    chosen = {"where": "id % 3 != 0"}
    spec_plain = tmp_path / "plain.yaml"
    spec_plain.write_text(make_spec(tmp_path, path, "input", "plain", input=chosen).read_text())
    spec = make_spec(tmp_path, path, "prefix", input=chosen)
    for part in ("0/2", "1/2"):
        jobs.finish(spec, "--slice", part)
    jobs.finish(spec_plain)
    rows = [row for part in range(2) for row in jobs.rows_of(tmp_path / "out" / f"slice-{part}")]
    assert sorted(rows, key=lambda row: row["row_index"]) == jobs.rows_of(tmp_path / "plain")
    assert all(edges(tmp_path / "out" / f"slice-{part}") <= 8 for part in range(2))
    # A row group is decoded whole for any of its rows: they were copied to where each is found.
    assert list((tmp_path / "out" / "source").glob("*.rows"))


def test_chosen_rows_in_an_order_are_shown_and_found_again(tmp_path: pathlib.Path) -> None:
    path, chosen = tmp_path / "rows.jsonl", {"where": "id % 3 != 0", "limit": 50}
    write_jsonl(path, make_rows())
    spec = make_spec(tmp_path, path, "longest", sampling={"max_tokens": {"column": "budget"}}, input=chosen)
    jobs.finish(spec)
    file = tmp_path / "out" / positions_name(1)
    data, rows = file.read_bytes(), [row["row_index"] for row in in_order(tmp_path / "out")]
    assert rows == [row for row in range(75) if row % 3]
    done = jobs.run("validate", spec, "--json", "--row", "4", "--row", "3", "--row", "200")
    shown = {row["row_index"]: row["is_run"] for row in json.loads(done.stdout)["rows"]}
    assert shown == {4: True, 3: False, 200: False}
    # Half of it is there, as after a torn write.
    file.write_bytes(data[: len(data) // 2])
    assert "selection/000001.positions" in jobs.run("check", tmp_path / "out").stdout
    jobs.finish(spec)
    assert file.read_bytes() == data


def test_the_longest_run_first_where_lengths_are_known(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, make_rows())
    sampling = {"max_tokens": {"column": "budget"}}
    spec = make_spec(tmp_path, path, "auto", sampling=sampling, scripted={"vary_lengths": False})
    done = jobs.finish(spec)
    assert "order: by max_tokens, the longer half first: sorting would take 0% more of 240 rows' prompts" in done.stderr
    out = tmp_path / "out"
    lengths = {row["row_index"]: row["num_output_tokens"] for row in jobs.rows_of(out)}
    order = RunOrder(Folder(out), jobs.state_of(out).extents)
    ran = [lengths[row] for own in order.shards() for row in own.at(own.to_run(0, len(own))).tolist()]
    waves = [ran[:120], ran[120:]]
    assert all(min(one) >= max(other) for one, other in itertools.pairwise(waves))
