"""The measured speed of a run, and what limited it, with one change to try. The end of a run stores it."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from batchinf.base.storage import Folder
from batchinf.engines.protocol import EngineInfo
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.status import ON_TRIAL, read_status
from batchinf.manifest.lines import Bottleneck, ReplicaShare, Speed
from batchinf.manifest.names import TELEMETRY_FOLDER
from batchinf.manifest.state import State
from batchinf.model.memory import share_of

# Samples of the telemetry that are read at most, spread evenly, and those that say something at least.
_MOST_LOOKS = 2000
_LEAST_LOOKS = 5
# Shares of the cache, and of `max_num_seqs`.
_FULL = 0.9
_HALF = 0.5
_ALL_RUNNING = 0.95
# Counts of requests that a replica has not finished, in a sample of the telemetry.
_AHEAD = ("num_running", "num_waiting", "num_ready")
# Where the GPU limits a job it was busy for 94 % of the time and more, and with embeddings that wait for the engine's
# Python for 59 to 80 % (`benchmarks/history/vllm-0.26.md`).
_BUSY = 0.85
_MOST_UTILIZATION = 0.95


# -- measured ----------------------------------------------------------------------------------------------------------


def measured_speed(folder: Folder, state: State, fleet: Fleet, work_s: float) -> Speed | None:
    """The speed of a fleet that worked for `work_s` seconds, by its engines and telemetry; None if its status is lost.

    `run_s` of it is the time of the engines, for the run has not ended.
    """
    if (status := read_status(folder)) is None:
        return None
    work_s = max(1e-3, work_s)
    engines = {replica.number: info for replica in fleet.replicas if (info := replica.last_engine) is not None}
    ready_at = [at for replica in fleet.replicas for at in replica.ready_at]
    num_gpus = len({device for replica in status.replicas for device in replica.devices})
    looks = list(looks_of_epoch(folder, fleet.epoch))
    return Speed(
        run_s=work_s,
        work_s=work_s,
        prompt_tokens_per_s=status.num_prompt_tokens / work_s,
        output_tokens_per_s=status.num_output_tokens / work_s,
        num_gpus=num_gpus,
        cache_tokens=min((engine.cache_tokens for engine in engines.values() if engine.cache_tokens), default=None),
        bottleneck=bottleneck(looks, engines, num_gpus, has_images=bool(state.header.spec["input"].get("images"))),
        replicas=shares(looks, len(status.replicas), work_s),
        late_s=max(ready_at) - min(ready_at),
    )


def shares(looks: Sequence[Mapping[str, Any]], num_replicas: int, work_s: float) -> tuple[ReplicaShare, ...]:
    """What each replica did of a run that worked for `work_s` seconds, by its telemetry; empty for a single one."""
    if num_replicas < 2:
        return ()
    last = {replica["incarnation"]: replica for look in looks for replica in look["replicas"]}
    num_rows = [0] * num_replicas
    busy_s = [0.0] * num_replicas
    for replica in last.values():
        num_rows[replica["replica"]] += replica["num_answered"]
        busy_s[replica["replica"]] += replica["busy_s"]
    return tuple(ReplicaShare(rows, round(min(1.0, s / work_s), 3)) for rows, s in zip(num_rows, busy_s, strict=True))


def looks_of_epoch(folder: Folder, epoch: int) -> Iterator[Mapping[str, Any]]:
    """Samples of an epoch's telemetry, in order, spread evenly if there are more than 2,000."""
    path = folder.path(f"{TELEMETRY_FOLDER}/{epoch:06d}.jsonl")
    with contextlib.suppress(OSError), path.open("rb") as file:
        num_lines = path.stat().st_size // max(1, len(file.readline()))
        step = max(1, num_lines // _MOST_LOOKS)
        last = b""
        file.seek(0)
        for number, line in enumerate(file):
            last = line if number % step else b""
            if not last:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)
        with contextlib.suppress(ValueError):  # it has the totals
            if last:
                yield json.loads(last)


# -- what limited it ---------------------------------------------------------------------------------------------------


Kind = Literal["memory", "sequences", "input", "images", "processor", "compute"]


def bottleneck(
    looks: Sequence[Mapping[str, Any]],
    engines: Mapping[int, EngineInfo],
    num_gpus: int,
    *,
    has_images: bool = False,
) -> Bottleneck | None:
    """What limited the engines for most of the time in which all had rows.

    None if that time is too short to say, or if all rows fit into the engines at once.

    The rules, in this order. memory: the cache is full and fewer than `max_num_seqs` sequences run. sequences:
    `max_num_seqs` run and half of the cache is empty. input: the engine has room and no row is ready; images: the same
    in a job whose rows have images, because rendering them takes far longer than reading the rest. processor: none of
    these, and the GPUs are idle for 15 % of the time or more. compute: none of these.
    """
    if _totals(looks)[1] <= sum(engine.max_num_seqs for engine in engines.values()):
        return None
    shares: dict[Kind, float] = {}
    times: set[float] = set()
    busy: list[float] = []  # shares of the time in which the GPUs run a kernel
    for at, seconds, replica, devices in _with_rows_left(looks):
        if (engine := engines.get(replica["replica"])) is not None:
            kind = _kind(replica, engine)
            shares[kind] = shares.get(kind, 0.0) + seconds
            busy += [device["utilization"] / 100 for device in devices]
            times.add(at)
    total = sum(shares.values())
    if len(times) < _LEAST_LOOKS or not total:
        return None
    kind = max(shares, key=lambda each: shares[each])
    kind = kind if shares[kind] >= total / 2 else "compute"
    share = shares.get(kind, 0.0) / total
    if kind == "compute" and busy and (share_busy := sum(busy) / len(busy)) < _BUSY:
        kind = "processor"
        share = 1 - share_busy
    if kind == "input" and has_images:
        kind = "images"
    engine = next(iter(engines.values()))
    reason = _REASONS[kind].format(share=share, most=engine.max_num_seqs)
    return Bottleneck(kind, round(share, 3), reason, _change(kind, engine, num_gpus, len(engines)))


def _totals(looks: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
    """For each sample, the rows that are done or in a replica; and the rows that are done in the end."""
    num_rows: dict[str, int] = {}
    totals = []
    for look in looks:
        num_rows |= {replica["incarnation"]: replica["num_rows"] for replica in look["replicas"]}
        num_ahead = sum(replica[name] for replica in look["replicas"] for name in _AHEAD)
        totals.append(sum(num_rows.values()) + num_ahead)
    return totals, sum(num_rows.values())


def _with_rows_left(
    looks: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[float, float, Mapping[str, Any], Sequence[Mapping[str, Any]]]]:
    """When a sample was taken, the time until the next one, one of its working replicas, and the job's devices.

    The end is left out: there the engines have room because no row is left. So are trials of suspected rows.
    """
    totals, num_all_rows = _totals(looks)
    for total, (look, later) in zip(totals, itertools.pairwise(looks), strict=False):
        if total >= num_all_rows:
            return
        devices = [device for device in look.get("devices", ()) if device["utilization"] is not None]
        for replica in look["replicas"]:
            if replica["steps"] and replica["state"] != ON_TRIAL:
                yield look["at"], later["at"] - look["at"], replica, devices


def _kind(replica: Mapping[str, Any], engine: EngineInfo) -> Kind:
    has_room = replica["num_running"] < _ALL_RUNNING * engine.max_num_seqs
    usage = replica["kv_cache_usage"]
    if has_room and usage >= _FULL:
        return "memory"
    if not has_room and usage < _HALF:
        return "sequences"
    return "input" if has_room and not replica["num_ready"] + replica["num_waiting"] else "compute"


_REASONS: dict[Kind, str] = {
    "memory": "for {share:.0%} of the time the cache was full with fewer than max_num_seqs {most:,} sequences",
    "sequences": "for {share:.0%} of the time all {most:,} sequences ran, and half of the cache or more was empty",
    "input": "for {share:.0%} of the time the engine had room, and no row was ready: it waited for the input or the "
    "tokenizer",
    "images": "for {share:.0%} of the time the engine had room, and no row was ready: it waited for images that are "
    "loaded and rendered on the processor",
    "processor": "the engine had enough rows and enough cache, and the GPUs ran nothing for {share:.0%} of the time",
    "compute": "the engine had enough rows and enough cache, so it waited for arithmetic",
}


def _change(kind: Kind, engine: EngineInfo, num_gpus: int, num_engines: int) -> str:
    if kind == "sequences":
        return f"engine.max_num_seqs {2 * engine.max_num_seqs}"
    if kind == "input":
        return "more processor cores, or token ids made before (input.token_ids_column)"
    if kind == "images":
        return "more processor cores or more replicas, which render at the same time, or smaller images"
    if kind == "processor":
        if engine.num_devices == 1:
            return f"parallel.replicas_per_device {max(1, num_engines // max(1, num_gpus)) + 1}, or batchinf tune"
        return "a faster processor, or fewer GPUs for each replica"
    if kind == "compute":
        return "more GPUs, as replicas share the rows" if num_gpus else "more processor cores, or a GPU"
    return _more_cache(engine, num_gpus)


def _more_cache(engine: EngineInfo, num_gpus: int) -> str:
    if num_gpus >= 2 * engine.num_devices:
        size = 2 * engine.tensor_parallel_size
        return f"parallel.tensor_parallel_size {size}: half of the replicas, each with more cache"
    if share_of(engine.arguments) < _MOST_UTILIZATION:
        return f"engine.gpu_memory_utilization {_MOST_UTILIZATION}"
    if not str(engine.arguments.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return "engine.kv_cache_dtype fp8, for a new job, as it changes values"
    return "GPUs with more memory"
