"""Simulates the end of a job on several replicas, with the real decisions of `batchinf.schedule.shards`.

    python benchmarks/tail.py --rows 6000 --replicas 1,2,4,8
    python benchmarks/tail.py --rows 6000 --replicas 4 --order input --speeds 1,1,1,0.8

`--rows` is the number for each replica. Lengths are log-normal (mean 179, at most 1,500). A step takes `--step-ms` plus
`--request-us` for each request: by default 85 ms with 1,024 requests, as for Llama-3.1-8B's shape on an H200. The
coordinator decides every 0.2 s and learns of finished rows once a second. The script prints the job's time, its share
of linear speed-up, and the replicas' idle time at the end.

Orders: `input`; `sorted`, by length; `longest`, as with `input.order: longest`.
"""

import argparse
import heapq
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from workloads import log_normal_lengths

from batchinf.job.ordering import WAVES_AND_HANDS
from batchinf.records import Extent, Shard
from batchinf.replica.worker import window
from batchinf.schedule.shards import (
    PendingShards,
    ReplicaLoad,
    choose_rows_per_shard,
    next_shards,
    revocations,
    total_shards,
)

TURN_S, PROGRESS_S = 0.2, 1.0


@dataclass
class Replica:
    """An engine with its waiting requests."""

    index: int
    max_num_seqs: int
    speed: float
    assigned: deque[Shard] = field(default_factory=deque)
    ready: deque[int] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)
    ends: list[tuple[int, int]] = field(default_factory=list)  # (step at which the row is finished, row)
    held: dict[int, Shard] = field(default_factory=dict)
    step: int = 0
    num_finished: int = 0
    num_said: int = 0
    num_given: int = 0
    time: float = 0.0
    busy_until: float = 0.0

    def load(self) -> ReplicaLoad:
        """The load that the coordinator knows."""
        unbegun = tuple(shard.index for shard in self.assigned)
        return ReplicaLoad(
            self.index, window(self.max_num_seqs), max(0, self.num_given - self.num_said), unbegun, is_accepting=True
        )

    def turn(self, until: float, lengths: list[int], order: list[int], step_s: float, request_s: float) -> None:
        """Run steps until the time `until`."""
        while self.time < until:
            while self.assigned and len(self.ready) < window(self.max_num_seqs) // 2:
                shard = self.assigned.popleft()
                self.ready.extend(order[shard.start : shard.stop])
            while self.ready and len(self.waiting) + len(self.ends) < window(self.max_num_seqs):
                self.waiting.append(self.ready.popleft())
            while self.waiting and len(self.ends) < self.max_num_seqs:
                row = self.waiting.popleft()
                heapq.heappush(self.ends, (self.step + lengths[row], row))
            if not self.ends:
                self.time = until
                return
            self.time += (step_s + request_s * len(self.ends)) / self.speed
            self.step += 1
            while self.ends and self.ends[0][0] <= self.step:
                heapq.heappop(self.ends)
                self.num_finished += 1
                self.busy_until = self.time


def simulate(
    lengths: list[int],
    order: list[int],
    is_dealt: bool,
    speeds: list[float],
    starts: list[float],
    max_num_seqs: int,
    step_s: float,
    request_s: float,
) -> tuple[float, list[float]]:
    """Seconds of the job, and each replica's idle seconds at its end. is_dealt: the job has an `input.order`."""
    num_rows = len(lengths)
    rows_per_shard = choose_rows_per_shard(num_rows, len(speeds), 179 * 36, is_longest_first=is_dealt)
    extent = Extent(0, num_rows, rows_per_shard, 0, 0, num_rows)
    pending = PendingShards([extent], np.zeros(total_shards([extent]), np.bool_))
    replicas = [Replica(index, max_num_seqs, speed) for index, speed in enumerate(speeds)]
    now, told = 0.0, 0.0
    while sum(replica.num_finished for replica in replicas) < num_rows:
        is_up = [start <= now for start in starts]
        loads = [replica.load() for replica in replicas if is_up[replica.index]]
        for index, shard in next_shards(pending, loads, is_gathering=is_dealt and not all(is_up)):
            replicas[index].assigned.append(shard)
            replicas[index].num_given += shard.num_rows
        loads = [replica.load() for replica in replicas if is_up[replica.index]]
        for index, shards in revocations(pending, loads).items():
            owner = replicas[index]
            back = [shard for shard in owner.assigned if shard.index in shards]
            owner.assigned = deque(shard for shard in owner.assigned if shard.index not in shards)
            owner.num_given -= sum(shard.num_rows for shard in back)
            pending.give_back(shard.index for shard in back)
        now += TURN_S
        for replica in replicas:
            replica.turn(now, lengths, order, step_s, request_s)
        if now - told >= PROGRESS_S:
            told = now
            for replica in replicas:
                replica.num_said = replica.num_finished
    end = max(replica.busy_until for replica in replicas)
    return end, [end - replica.busy_until for replica in replicas]


def in_order(lengths: list[int], order: str) -> list[int]:
    rows = list(range(len(lengths)))
    if order == "input":
        return rows
    rows.sort(key=lambda row: -lengths[row])
    if order == "sorted":
        return rows
    num_waves, num_hands = WAVES_AND_HANDS
    size = -(-len(rows) // num_waves)
    waves = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [row for wave in waves for hand in range(num_hands) for row in wave[hand::num_hands]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=6000, help="a replica")
    parser.add_argument("--replicas", default="1,2,4,8")
    parser.add_argument("--order", choices=("input", "sorted", "longest", "all"), default="all")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--request-us", type=float, default=75.0)
    parser.add_argument("--speeds", help="of each replica, with commas between them; all alike by default")
    parser.add_argument("--starts", default="0", help="when replicas are up, in turn, in seconds")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    print("| order | replicas | seconds | of linear | idle at the end, mean and most, s |\n" + "| --- " * 5 + "|")
    for order in ("input", "sorted", "longest") if args.order == "all" else (args.order,):
        one = 0.0
        for number in map(int, args.replicas.split(",")):
            speeds = [float(speed) for speed in args.speeds.split(",")] if args.speeds else [1.0] * number
            late = [float(start) for start in args.starts.split(",")]
            starts = [late[index % len(late)] for index in range(number)]
            seconds, idle, rates = [], [], []
            for seed in range(args.seeds):
                lengths = log_normal_lengths(args.rows * number, seed=seed)
                rows = in_order(lengths, order)
                took, idles = simulate(
                    lengths,
                    rows,
                    order != "input",
                    speeds,
                    starts,
                    args.max_num_seqs,
                    args.step_ms / 1e3,
                    args.request_us / 1e6,
                )
                seconds.append(took)
                idle += idles
                rates.append(sum(lengths) / took)
            rate = statistics.mean(rates)
            one = one or rate / sum(speeds)
            print(
                f"| {order} | {number} | {statistics.mean(seconds):.1f} | {rate / (one * sum(speeds)):.3f} | "
                f"{statistics.mean(idle):.1f}, {max(idle):.1f} |"
            )


if __name__ == "__main__":
    main()
