"""A simulated day of replicas whose journal goes to a bucket: what a lost node costs, and how many requests."""

import itertools
import random

import pytest

from batchinf.output.checkpoints import next_journal_at, next_upload_at

DAY_S = 24 * 3600.0


def journal_times(interval_s: float, chance: random.Random) -> list[float]:
    """When the segments of one replica are durable over a day. It starts at any moment; checkpoints take some time."""
    now = chance.uniform(0.0, 1e6)
    end = now + DAY_S
    at = next_journal_at(now, interval_s, 0.0)
    durable = [now]
    while at < end:
        began = at + chance.uniform(0.0, 0.002) * interval_s
        took = chance.uniform(0.0, 0.02) * interval_s
        durable.append(began + took)
        # As the writer does: twice the last time, and what it gathers.
        at = next_journal_at(began, interval_s, 2 * took + 0.01 * interval_s)
    return durable


@pytest.mark.parametrize("interval_s", [0.2, 10.0, 60.0, 333.3])
def test_a_replica_journals_once_in_each_interval(interval_s: float) -> None:
    chance = random.Random(1)
    durable = journal_times(interval_s, chance)
    gaps = [after - before for before, after in itertools.pairwise(durable)]
    assert max(gaps) < 1.15 * interval_s
    assert len(gaps) <= DAY_S / interval_s + 2


def test_a_day_of_eight_replicas_costs_one_bundle_an_interval() -> None:
    interval_s = 10.0
    chance = random.Random(2)
    now = chance.uniform(0.0, 1e6)
    segments = []  # of all replicas: when each is durable
    for _ in range(8):
        at = next_journal_at(now + chance.uniform(0.0, 30.0), interval_s, 0.0)
        while at < now + DAY_S:
            # One checkpoint of a hundred waits seconds for the disk.
            took = chance.uniform(0.0, 0.1) if chance.random() < 0.99 else chance.uniform(0.0, 4.0)
            segments.append(at + took)
            at = next_journal_at(at, interval_s, min(2 * took, interval_s / 2) + 0.1)
    segments.sort()
    num_bundles = 0
    longest_wait_s = 0.0
    sent = 0
    at = now
    while at < now + DAY_S:
        at = next_upload_at(at, interval_s)
        first = sent
        while sent < len(segments) and segments[sent] <= at:
            sent += 1
        if sent > first:
            num_bundles += 1
            longest_wait_s = max(longest_wait_s, at - segments[first])
    assert num_bundles <= 10_000
    # Of a segment that comes just after the second look. All others wait for less than the first look.
    assert longest_wait_s <= 0.76 * interval_s
    in_time = sum(segment % interval_s > 9.0 or segment % interval_s < 0.5 for segment in segments)
    assert in_time > 0.97 * len(segments)


def test_looks_follow_one_another() -> None:
    at = 100.0
    looks = []
    for _ in range(4):
        at = next_upload_at(at, 10.0)
        looks.append(at)
    assert looks == pytest.approx([100.5, 103.0, 110.5, 113.0])
