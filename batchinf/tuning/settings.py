"""The candidates: settings that the spec leaves open and that change the speed, but not the output."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from batchinf.base.errors import SpecError
from batchinf.fleet.backend import Backend
from batchinf.fleet.settings import chosen_arguments, gains_from_sharing, replicas_per_device, shown
from batchinf.job.open import placing
from batchinf.model.identity import resolve
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, Fit, fit_of
from batchinf.planning.beginnings import shared_share
from batchinf.planning.degrees import that_fit
from batchinf.spec.file import SpecFile, read_spec
from batchinf.spec.job import JobSpec, fields
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of

Settings = Mapping[str, Any]  # dotted field of the spec → value

_MAX_NUM_SEQS = (512, 1024, 2048, 256)
_MAX_NUM_BATCHED_TOKENS = (8192, 16384, 32768, 4096)
_REPLICAS_PER_DEVICE = (2, 1, 3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try together. Without settings: the spec as it is."""

    settings: Settings = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The settings as JSON, equal for equal candidates."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def name(self) -> str:
        """The settings as people write them."""
        return ", ".join(f"{name} {shown(value)}" for name, value in self.settings.items()) or "the spec as it is"


def candidates(dimensions: Sequence[Sequence[Settings]]) -> Iterator[Candidate]:
    """The spec as it is, then each setting alone, then two of different dimensions together, and so on."""
    yield Candidate()
    for number in range(1, len(dimensions) + 1):
        for chosen in itertools.combinations(dimensions, number):
            for settings in itertools.product(*chosen):
                yield Candidate({name: value for one in settings for name, value in one.items()})


def named_by_user(file: SpecFile, texts: Sequence[str]) -> list[list[Settings]]:
    """The values of `--try engine.max_num_seqs=256,512`, one dimension for each text.

    Raises SpecError for a value that the field does not take, or that would change the output.
    """
    found: list[list[Settings]] = []
    for text in texts:
        name, equals, listed = text.partition("=")
        place = f"--try {text}"
        try:
            values = yaml.safe_load(f"[{listed}]")
        except yaml.YAMLError:
            values = []
        if not equals or not values:
            raise SpecError(f"{place}: must be field=value,value such as --try engine.max_num_seqs=256,512")
        found.append([{name.strip(): value} for value in values])
        for settings in found[-1]:
            _check(file.spec, settings, place)
    return found


def _check(spec: JobSpec, settings: Settings, place: str) -> None:
    changed = read_spec(spec, settings).spec
    before, after = fields(spec, "identity"), fields(changed, "identity")
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise SpecError(f"{place}: {name} changes the output; only fields that change the speed can be tried")


def requests_at_once(file: SpecFile, backend: Backend, tried: Sequence[Candidate]) -> int:
    """Requests that all engines of the spec run at once, with the largest batch that is tried.

    A replica with an `auto` degree may take all devices: the engines count as one then. Raises SpecError if the degrees
    do not fit the devices.
    """
    spec = file.spec
    own = spec.scripted.max_num_seqs if spec.scripted is not None else _now(spec, backend)[2]["max_num_seqs"]
    sizes = [value for one in tried for name, value in one.settings.items() if name.endswith(".max_num_seqs")]
    with placing(file):
        is_open = "auto" in (spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size)
        num_engines = 1 if is_open else len(backend.place(spec))
    return num_engines * max(value for value in (own, *sizes) if isinstance(value, int))


def left_open(file: SpecFile, backend: Backend) -> list[list[Settings]]:
    """What can be tried where the spec says nothing, the settings with the largest effect first.

    Several replicas on a device come last where one engine keeps the device busy: each of their trials starts several
    engines, one after the other. Values that the spec or the device already have are left out.
    """
    spec, task = file.spec, task_of(file.spec)
    num_devices, fit, now = _now(spec, backend, functools.partial(shared_share, file))
    replicas = _replicas(spec, fit, _replicas_now(spec, fit, num_devices))
    is_gain_likely = bool(replicas) and gains_from_sharing(spec, fit, task, num_devices)
    dimensions: list[list[Settings]] = [
        _degrees(spec, fit, num_devices),
        replicas if is_gain_likely else [],
        _engine(spec, "max_num_seqs", _MAX_NUM_SEQS, now),
        _as_vllm_comes(now),
        _engine(spec, "max_num_batched_tokens", _MAX_NUM_BATCHED_TOKENS, now),
        _caching(spec, task, fit, now),
        [] if "order" in spec.input.model_fields_set else [{"input.order": "prefix"}],
        [] if is_gain_likely else replicas,
    ]
    return [dimension for dimension in dimensions if dimension]


def kept_settings(file: SpecFile, backend: Backend, candidate: Candidate) -> Settings:
    """What the job chooses by the size of its input, which a sample does not have: the replicas on a device."""
    spec = read_spec(file.spec, candidate.settings).spec
    num_devices, fit, _ = _now(spec, backend)
    if spec.parallel.replicas_per_device != "auto" or (number := _replicas_now(spec, fit, num_devices)) == 1:
        return {}
    return {"parallel.replicas_per_device": number}


def _replicas_now(spec: JobSpec, fit: Fit, num_devices: int) -> int:
    return replicas_per_device(spec, fit, task_of(spec), num_devices) if num_devices else 1


def _now(
    spec: JobSpec, backend: Backend, share: Callable[[], float | None] = lambda: None
) -> tuple[int, Fit, Mapping[str, Any]]:
    """The number of local devices, the model on one of them, and engine arguments that the spec as it is gets.

    share: see `chosen_arguments`.
    """
    task = task_of(spec)
    devices = () if spec.scripted is not None or spec.backend == "ray" else backend.devices()
    if spec.parallel.devices is not None:
        devices = tuple(device for device in devices if device in map(str, spec.parallel.devices))
    size = backend.device_size(devices[0]) if devices else (None, "")
    fit = fit_of(resolve(spec.model), spec, *size, task.default_batch_limits)
    return len(devices), fit, {**fit.limits, **chosen_arguments(spec, fit, task, 1, shared_share=share).engine}


def _engine(spec: JobSpec, name: str, values: Sequence[int], now: Mapping[str, Any]) -> list[Settings]:
    if name in spec.engine or spec.scripted is not None:
        return []
    return [{f"engine.{name}": value} for value in values if value != now.get(name)]


def _as_vllm_comes(now: Mapping[str, Any]) -> list[Settings]:
    """Without the graphs that batchinf chooses, and without asynchronous scheduling if it comes with them.

    The prefix cache stays as it is, although the job chooses it only beside these.
    """
    chosen: dict[str, Any] = {name: None for name in ("compilation_config", "async_scheduling") if name in now}
    if "async_scheduling" in chosen and "enable_prefix_caching" in now:
        chosen["enable_prefix_caching"] = now["enable_prefix_caching"]
    return [{f"engine.{name}": value for name, value in chosen.items()}] if chosen else []


def _caching(spec: JobSpec, task: Task, fit: Fit, now: Mapping[str, Any]) -> list[Settings]:
    """Without the prefix cache, or with it if it is off, for tasks that only read prompts.

    There, filling the cache takes a large part of the scheduler's time, and pays only if prompts begin alike.
    """
    is_open = task.reads_prefix_cache and "enable_prefix_caching" not in spec.engine
    if task.draws_tokens or fit.device_bytes is None or not is_open:
        return []
    return [{"engine.enable_prefix_caching": not now.get("enable_prefix_caching", True)}]


def _replicas(spec: JobSpec, fit: Fit, now: int) -> list[Settings]:
    """Numbers of replicas on a device whose weights fit beside each other with room for their caches.

    now: their number in the spec as it is.
    """
    is_open = "replicas_per_device" not in spec.parallel.model_fields_set and spec.parallel.sizes == (1, 1)
    if not is_open or fit.device_bytes is None or fit.weight_bytes is None:
        return []
    most = fit.device_bytes // (2 * fit.weight_bytes)
    return [{"parallel.replicas_per_device": number} for number in _REPLICAS_PER_DEVICE if now != number <= most]


def _degrees(spec: JobSpec, fit: Fit, num_devices: int) -> list[Settings]:
    """The degrees that fit the devices, where the spec gives none or `auto`."""
    parallel = spec.parallel
    given = {name for name in parallel.model_fields_set if getattr(parallel, name) != "auto"}
    if num_devices < 2 or {"tensor_parallel_size", "pipeline_parallel_size"} & given or fit.max_model_len is None:
        return []
    if fit.needs.weights is None or fit.needs.kv_cache is None:
        return []
    share = float(spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION)
    found: list[Settings] = [
        {"parallel.tensor_parallel_size": it.tensor, "parallel.pipeline_parallel_size": it.pipeline}
        for it in that_fit(fit, fit.max_model_len, share, num_devices, most=num_devices)
        if num_devices % it.num_devices == 0 and (it.tensor, it.pipeline) != parallel.sizes
    ]
    return found
