"""The candidates: settings that the spec leaves open and that change the speed, but not the output."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from batchinf.base.errors import SpecError
from batchinf.fleet.backend import Backend
from batchinf.fleet.engine_defaults import chosen_arguments, gains_from_sharing, replicas_per_device, shown, values
from batchinf.fleet.parallel import local_devices
from batchinf.job.open import naming_lines
from batchinf.model.memory import Fit, fit_of, share_of
from batchinf.model.model import resolve
from batchinf.planning.degrees import Machine, that_fit
from batchinf.planning.lengths import shared_share
from batchinf.spec.file import SpecFile, read_spec
from batchinf.spec.job import JobSpec, fields
from batchinf.tasks.registry import task_of

Settings = Mapping[str, Any]  # dotted field of the spec → value

_MAX_NUM_SEQS = (512, 1024, 2048, 256)
_MAX_NUM_BATCHED_TOKENS = (8192, 16384, 32768, 4096)
_REPLICAS_PER_DEVICE = (2, 1, 3)


def name_of(settings: Settings) -> str:
    """Settings as people write them."""
    return ", ".join(f"{name} {shown(value)}" for name, value in settings.items()) or "the spec as it is"


def candidates(dimensions: Sequence[Sequence[Settings]]) -> Iterator[Settings]:
    """None for the spec as it is, then each setting alone, then two of different dimensions together, and so on."""
    for number in range(len(dimensions) + 1):
        for chosen in itertools.combinations(dimensions, number):
            for parts in itertools.product(*chosen):
                yield {name: value for settings in parts for name, value in settings.items()}


def named_by_user(spec: JobSpec, text: str) -> list[Settings]:
    """The dimension of `--try engine.max_num_seqs=256,512`. Raises SpecError if it is wrong or changes the output."""
    name, equals, listed = text.partition("=")
    place = f"--try {text}"
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError:
        values = []
    if not equals or not values:
        raise SpecError(f"{place}: must be field=value,value such as --try engine.max_num_seqs=256,512")
    dimension: list[Settings] = [{name.strip(): value} for value in values]
    before = fields(spec, "identity")
    for settings in dimension:
        after = fields(read_spec(spec, settings).spec, "identity")
        if changed := [field for field in before.keys() | after.keys() if before.get(field) != after.get(field)]:
            raise SpecError(f"{place}: {changed[0]} changes the output; only fields that change the speed can be tried")
    return dimension


@dataclass(frozen=True, slots=True)
class _Start:
    """What a job with this spec starts with on the devices of this host."""

    spec: JobSpec
    num_devices: int
    fit: Fit
    """The model on one device."""
    arguments: Mapping[str, Any]
    """Engine arguments that the spec leaves open, as the job chooses them."""

    @classmethod
    def of(cls, spec: JobSpec, backend: Backend, share: Callable[[], float | None] = lambda: None) -> "_Start":
        """share: see `chosen_arguments`."""
        task = task_of(spec)
        devices = local_devices(spec, backend)
        size = backend.device_size(devices[0]) if devices else (None, "")
        fit = fit_of(resolve(spec.model), spec, *size, limits_of=task.default_batch_limits)
        chosen = chosen_arguments(spec, fit, task, 1, shared_share=share)
        return cls(spec, len(devices), fit, {**fit.limits, **values(chosen)})

    @property
    def replicas_per_device(self) -> int:
        return replicas_per_device(self.spec, self.fit, task_of(self.spec), self.num_devices) if self.num_devices else 1


def requests_at_once(file: SpecFile, backend: Backend, tried: Sequence[Settings]) -> int:
    """Requests that all engines of the spec run at once, with the largest batch that is tried.

    A replica with an `auto` degree may take all devices: the engines count as one then. Raises SpecError if the degrees
    do not fit the devices.
    """
    spec = file.spec
    sizes = [value for one in tried for name, value in one.items() if name.endswith(".max_num_seqs")]
    if spec.scripted is not None:
        sizes.append(spec.scripted.max_num_seqs)
    else:
        sizes.append(_Start.of(spec, backend).arguments["max_num_seqs"])
    with naming_lines(file):
        is_open = "auto" in (spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size)
        num_engines = 1 if is_open else len(backend.slots_for(spec))
    return num_engines * max(size for size in sizes if isinstance(size, int))


def left_open(file: SpecFile, backend: Backend) -> list[list[Settings]]:
    """What can be tried where the spec says nothing, the settings with the largest effect first.

    Several replicas on a device come last where one engine keeps the device busy: each of their trials starts several
    engines, one after the other. Values that the spec or the device already have are left out.
    """
    start = _Start.of(file.spec, backend, functools.partial(shared_share, file))
    replicas = _replicas(start)
    is_gain_likely = bool(replicas) and gains_from_sharing(file.spec, start.fit, task_of(file.spec), start.num_devices)
    dimensions: list[list[Settings]] = [
        _degrees(start),
        replicas if is_gain_likely else [],
        _engine(start, "max_num_seqs", _MAX_NUM_SEQS),
        _vllm_defaults(start),
        _engine(start, "max_num_batched_tokens", _MAX_NUM_BATCHED_TOKENS),
        _caching(start),
        [] if "order" in file.spec.input.model_fields_set else [{"input.order": "prefix"}],
        [] if is_gain_likely else replicas,
    ]
    return [dimension for dimension in dimensions if dimension]


def kept_settings(file: SpecFile, backend: Backend, settings: Settings) -> Settings:
    """What the job chooses by the size of its input, which a sample does not have: the replicas on a device."""
    start = _Start.of(read_spec(file.spec, settings).spec, backend)
    if start.spec.parallel.replicas_per_device != "auto" or (number := start.replicas_per_device) == 1:
        return {}
    return {"parallel.replicas_per_device": number}


def _engine(start: _Start, name: str, values: Sequence[int]) -> list[Settings]:
    if name in start.spec.engine or start.spec.scripted is not None:
        return []
    return [{f"engine.{name}": value} for value in values if value != start.arguments.get(name)]


def _vllm_defaults(start: _Start) -> list[Settings]:
    """Without the graphs that batchinf chooses and the asynchronous scheduling with them. The prefix cache stays."""
    names = [name for name in ("compilation_config", "async_scheduling") if name in start.arguments]
    settings: dict[str, Any] = {f"engine.{name}": None for name in names}
    if "async_scheduling" in names and "enable_prefix_caching" in start.arguments:
        settings["engine.enable_prefix_caching"] = start.arguments["enable_prefix_caching"]
    return [settings] if settings else []


def _caching(start: _Start) -> list[Settings]:
    """The prefix cache off, or on if it is off, for tasks that only read prompts: filling it takes much of the time."""
    task = task_of(start.spec)
    is_open = task.reads_prefix_cache and "enable_prefix_caching" not in start.spec.engine
    if task.draws_tokens or start.fit.device_bytes is None or not is_open:
        return []
    return [{"engine.enable_prefix_caching": not start.arguments.get("enable_prefix_caching", True)}]


def _replicas(start: _Start) -> list[Settings]:
    """Numbers of replicas on a device whose weights fit beside each other with room for their caches."""
    parallel = start.spec.parallel
    fit = start.fit
    is_open = "replicas_per_device" not in parallel.model_fields_set and parallel.sizes == (1, 1)
    if not is_open or fit.device_bytes is None or fit.weight_bytes is None:
        return []
    most = fit.device_bytes // (2 * fit.weight_bytes)
    chosen = start.replicas_per_device
    return [{"parallel.replicas_per_device": number} for number in _REPLICAS_PER_DEVICE if chosen != number <= most]


def _degrees(start: _Start) -> list[Settings]:
    parallel = start.spec.parallel
    fit = start.fit
    num_devices = start.num_devices
    named = {"tensor_parallel_size", "pipeline_parallel_size"} & parallel.model_fields_set
    if num_devices < 2 or any(getattr(parallel, name) != "auto" for name in named):
        return []
    if None in (fit.max_model_len, fit.weights, fit.kv_cache):
        return []
    assert fit.max_model_len is not None
    share = share_of(start.spec.engine)
    return [
        {"parallel.tensor_parallel_size": degrees.tensor, "parallel.pipeline_parallel_size": degrees.pipeline}
        for degrees in that_fit(fit, Machine(None, num_devices, 1, share), fit.max_model_len)
        if num_devices % degrees.num_devices == 0 and (degrees.tensor, degrees.pipeline) != parallel.sizes
    ]
