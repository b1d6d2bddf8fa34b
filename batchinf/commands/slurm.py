"""`batchinf slurm`: writes an sbatch script that runs a job to its end, and submits it.

A script has one of three forms: one node, a job array of slices, or several nodes with Ray. See docs/slurm.md.
"""

import importlib.resources
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2

from batchinf.base.errors import OutputError, SpecError, UserError
from batchinf.base.slices import MAX_SLICES, Slice, check_place
from batchinf.base.storage import naming_option, write_named
from batchinf.base.text import clip, counted
from batchinf.engines.installed import cuda_of_build
from batchinf.spec.file import SpecFile
from batchinf.spec.job import ParallelSpec

# The beginning of a script, whose second line is `SlurmOptions.command`. `job.sbatch` is the template of all scripts.
SCRIPT_MARK = b"#!/bin/bash\n# batchinf slurm"
# Slurm's limit for --signal.
_MOST_SIGNAL_S = 65_535
_CPUS_PER_GPU = 8
# A smaller number without a unit is probably meant in GB. 0 means all memory of a node.
_LEAST_MEM_MB = 1024

# Options of sbatch that the script itself needs, and what to write instead.
_ELSEWHERE = {
    "array": "each task would run the whole job: write --array 8 without --sbatch, for 8 slices",
    "signal": "the script stops the job by this signal: set stop_before_s in the spec, in seconds before the limit",
    "nodes": "write --nodes without --sbatch, so that the script starts Ray on them",
}
_SHORT_NAMES = {"-a": "array", "-N": "nodes", "-G": "gpus"}
# Options of sbatch by which a job gets GPUs without `--gpus`.
_GIVES_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres", "exclusive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of a script. None, or empty: the cluster's default."""

    num_nodes: int = 1
    """More than one starts Ray."""
    array: str | None = None
    """Slices of a job array, and how many run at a time, such as `8` or `8%2`; None for no array."""
    max_requeues: int = 5
    """How often in a row a job is queued again without a new finished row."""
    gpus: str | None = None
    """Of each node, such as `4` or `a100:4`."""
    cpus: int | None = None
    """Of each node."""
    mem: str | None = None
    time: str | None = None
    """As Slurm writes it, and so is `mem`."""
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    container: str | None = None
    """An image for Apptainer."""
    directives: tuple[str, ...] = ()
    """Further options of sbatch."""
    overrides: tuple[str, ...] = ()
    """Those of `--set`."""
    command: str = "batchinf slurm"
    """The line that the user typed, `batchinf slurm` first, for a comment."""

    @property
    def num_slices(self) -> int | None:
        """Tasks of the job array; None for no array. Raises SpecError."""
        if self.array is None:
            return None
        allowed = "a number of slices, such as 8, or 8%2 to run at most 2 of them at a time"
        return int(_matched("--array", self.array, r"([1-9][0-9]{0,6})(?:%[1-9][0-9]{0,6})?", allowed)[1])

    @property
    def num_gpus(self) -> int | None:
        """GPUs of each node; None if no GPU is asked for. Raises SpecError."""
        if self.gpus is None:
            return None
        allowed = "a number or type:number, such as 4 or a100:4"
        return int(_matched("--gpus", self.gpus, r"(?:[\w.-]+:)?([1-9][0-9]{0,3})", allowed)[1])


def _matched(option: str, text: str, pattern: str, allowed: str) -> re.Match[str]:
    """The match of an option's text. Raises SpecError if the pattern does not match all of it."""
    if (match := re.fullmatch(pattern, text)) is None:
        raise SpecError(f"{option}: got {clip(text)!r}; must be {allowed}")
    return match


def folder_of(file: SpecFile) -> pathlib.Path:
    """The folder of a job's script and logs: beside its output folder; for a bucket, in the working folder."""
    if file.spec.output.is_bucket:
        return pathlib.Path(f"{pathlib.PurePosixPath(file.spec.output.path).name}.slurm")
    return pathlib.Path(f"{file.spec.output.path.rstrip('/')}.slurm")


def script_of(file: SpecFile, options: SlurmOptions) -> str:
    """The text of a script. Raises SpecError for options that do not fit together or do not fit the spec."""
    _check_options(options, file.spec.output.path)
    _check_times(file, options)
    _check_devices(file, options)
    settings = [word for text in options.overrides for word in ("--set", text)]
    prefix = _prefix(options)
    return _template().render(
        options=options,
        directives=_directives(file, options),
        prefix=prefix,
        batchinf=prefix + shlex.join(["batchinf", "run", file.path, *settings]),
        logs=str(folder_of(file)),
        out=file.spec.output.path.rstrip("/"),
        slice_digits=len(str((options.num_slices or 1) - 1)),
        ray_log=_log(file, "%j-ray"),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    text = importlib.resources.files(__package__).joinpath("job.sbatch").read_text(encoding="utf-8")
    return environment.from_string(text)


def _prefix(options: SlurmOptions) -> str:
    """What stands before a command that runs in the job's environment."""
    if options.container is None:
        return ""
    return shlex.join(["apptainer", "exec", *(["--nv"] if options.gpus is not None else []), options.container]) + " "


def _check_options(options: SlurmOptions, out: str) -> None:
    if options.num_nodes > 1 and options.num_slices is not None:
        raise SpecError(
            "got --array with --nodes; slices need one node each, and Ray needs no slices: give one of them"
        )
    if options.num_slices is not None and options.num_slices > MAX_SLICES:
        raise SpecError(f"--array: got {options.num_slices}; must be at most {MAX_SLICES}")
    if options.venv is not None and options.container is not None:
        raise SpecError("got --venv with --container; give only the one that has batchinf")
    _check_texts(options, out)
    mem = options.mem or ""
    if re.fullmatch("[0-9]{1,9}", mem) and 0 < int(mem) < _LEAST_MEM_MB:
        raise SpecError(
            f"--mem: got {mem}, which means {mem} MB to Slurm; write {mem}G for GB, or {mem}M if you mean MB"
        )


def _check_texts(options: SlurmOptions, out: str) -> None:
    """Raise SpecError for texts that an sbatch script cannot hold."""
    for text in (options.command, out):
        if not text.isprintable():
            raise SpecError(
                f"got {clip(text, 200)}; an sbatch script cannot hold its control characters: leave them out"
            )
    for line in options.directives:
        if not line.startswith("-"):
            raise SpecError(f"--sbatch: got {clip(line)!r}; must be an option of sbatch, such as --sbatch=--qos=high")
        for name in _option_names(line):
            if name in _ELSEWHERE and not (name == "array" and options.array is not None):
                raise SpecError(f"--sbatch: got {clip(line)!r}; {_ELSEWHERE[name]}")


def _option_names(directive: str) -> Iterator[str]:
    """The options in one `--sbatch`, by their long names: sbatch takes each beginning that no other option has."""
    for word in re.findall(r"(?:^|\s)(-[^\s=]*)", directive):
        name = word.removeprefix("--")
        if name != word:
            yield next((known for known in _ELSEWHERE if len(name) > 1 and known.startswith(name)), name)
        else:
            yield _SHORT_NAMES.get(word[:2], word)


def _check_times(file: SpecFile, options: SlurmOptions) -> None:
    if "\\" in file.spec.output.path:  # in the name of a log it switches off Slurm's fields such as %j
        raise file.error("output.path", f"got {clip(file.spec.output.path, 200)}; Slurm's logs allow no backslash")
    stop_before_s = math.ceil(file.spec.stop_before_s)
    if not 1 <= stop_before_s <= _MOST_SIGNAL_S:
        limits = f"under Slurm it must be from 1 to {_MOST_SIGNAL_S}"
        raise file.error("stop_before_s", f"got {file.spec.stop_before_s:g}; {limits}")
    if file.spec.drain_timeout_s >= stop_before_s:
        raise file.error(
            "drain_timeout_s",
            f"got {file.spec.drain_timeout_s:g}, but Slurm kills the job stop_before_s = {stop_before_s} s after its "
            "signal; lower drain_timeout_s, or raise stop_before_s",
        )
    if options.time is not None and (time_s := _seconds(options.time)) <= stop_before_s:
        raise SpecError(
            f"--time: got {options.time}, which is {time_s} s, but the job stops {stop_before_s} s before that: ask "
            "for more time, or lower stop_before_s"
        )


def _check_devices(file: SpecFile, options: SlurmOptions) -> None:
    parallel = file.spec.parallel
    if options.num_nodes > 1:
        _check_ray(file)
        _check_gpus_of_nodes(file, options)
    elif file.spec.backend == "ray" and file.spec.ray.address is None:
        raise file.error(
            "backend",
            "got ray without --nodes, so the script starts no Ray; ask for --nodes 2 or more, give the ray.address of "
            "a cluster, or leave backend out for one node",
        )
    if options.num_gpus is None or file.spec.scripted is not None:
        return
    needed = _num_devices(parallel)
    num_devices = options.num_gpus * options.num_nodes
    if needed > num_devices:
        raise file.error(
            "parallel",
            f"needs {needed} devices, but --gpus {options.gpus} on {options.num_nodes} node(s) gives {num_devices}; "
            "ask for more, or lower a degree",
        )


def _num_devices(parallel: ParallelSpec) -> int:
    """How many devices the replicas need at least."""
    sharers = 1 if parallel.replicas_per_device == "auto" else parallel.replicas_per_device
    num_groups = 1 if parallel.data_parallel_size == "auto" else math.ceil(parallel.data_parallel_size / sharers)
    return math.prod(parallel.sizes) * num_groups


def _check_ray(file: SpecFile) -> None:
    """Refuse what a run with `backend: ray` refuses, or does not choose."""
    if file.spec.output.is_bucket:
        raise file.error(
            "output.path",
            "got a bucket with --nodes; Ray's nodes need a folder that they share: run slices with --array",
        )
    parallel = file.spec.parallel
    if parallel.devices is not None:
        raise file.error("parallel.devices", "got a list with --nodes; Ray chooses the devices: leave it out")
    if parallel.replicas_per_device not in ("auto", 1):
        raise file.error(
            "parallel.replicas_per_device",
            f"got {parallel.replicas_per_device} with --nodes; with Ray it must be 1: leave it out",
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) == "auto":
            raise file.error(f"parallel.{name}", "got auto with --nodes; with Ray it must be a number")


def _check_gpus_of_nodes(file: SpecFile, options: SlurmOptions) -> None:
    """Raise SpecError if engines need GPUs, and nothing asks Slurm for them: Ray would see nodes without GPUs."""
    names = {name for line in options.directives for name in _option_names(line)}
    if options.gpus is not None or file.spec.scripted is not None or not names.isdisjoint(_GIVES_GPUS):
        return
    parallel = file.spec.parallel
    if parallel.sizes[1] > 1:
        why = f"parallel.pipeline_parallel_size is {parallel.sizes[1]}, which needs GPUs"
    elif options.container is None and cuda_of_build(_torch_of(options.venv)) is not None:
        why = f"the vLLM of {options.venv or 'this environment'} runs on GPUs"
    else:
        return
    raise SpecError(
        f"--nodes: got {options.num_nodes} without --gpus, but {why}; add --gpus N, the GPUs of each node, or "
        "--sbatch=--exclusive if whole nodes come with their GPUs"
    )


def _torch_of(venv: str | None) -> pathlib.Path | None:
    """The folder of PyTorch in a virtual environment; None without one: that of this process."""
    if venv is None:
        return None
    return next(pathlib.Path(venv).glob("lib/python3*/site-packages/torch"), pathlib.Path(venv, "torch"))


def _seconds(time: str) -> int:
    allowed = "a time such as 90 (minutes), 12:00:00 or 1-12:00:00"
    match = _matched("--time", time, r"(?:([0-9]{1,5})-)?([0-9]{1,9}(?::[0-9]{1,5}){0,2})", allowed)
    numbers = [int(number) for number in match[2].split(":")]
    if match[1] is None and len(numbers) < 3:  # minutes[:seconds]
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]  # days-hours[:minutes[:seconds]], or hours:minutes:seconds
    return ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _log(file: SpecFile, name: str) -> str:
    """A log as Slurm names it: `%` begins a field such as the job's id."""
    return str(folder_of(file)).replace("%", "%%") + f"/{name}.log"


def _array(options: SlurmOptions) -> str | None:
    if options.num_slices is None or options.array is None:
        return None
    _, percent, most_at_once = options.array.partition("%")
    return f"0-{options.num_slices - 1}{percent}{most_at_once}"


def _directives(file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """The options of sbatch. Slurm sends the signal up to 60 s earlier than asked."""
    cpus = options.cpus if options.cpus is not None else _CPUS_PER_GPU * (options.num_gpus or 1)
    fields = {
        "job-name": pathlib.Path(file.spec.output.path).name,
        "output": _log(file, "%A_%a" if options.num_slices is not None else "%j"),
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR1@{math.ceil(file.spec.stop_before_s)}",
        "array": _array(options),
        "nodes": str(options.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gres": None if options.gpus is None else f"gpu:{options.gpus}",
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "constraint": options.constraint,
        # Ray's other nodes go on without a node that fails.
        "no-kill": "" if options.num_nodes > 1 else None,
    }
    for option, value in fields.items():
        if value is not None:
            yield f"--{option}" + (f"={shlex.quote(value)}" if value else "")
    yield from map(_quoted, options.directives)


def _quoted(directive: str) -> str:
    """A directive of the user, with quotes around a value of several words.

    It stays as it is if the user has quoted the value, or if a further option follows.
    """
    name, is_value, value = directive.partition("=")
    if not is_value or re.search(r"[\s'\"\\]", name) or re.search(r"\s--?[a-zA-Z]", value) or _is_one_word(value):
        return directive
    return f"{name}={shlex.quote(value)}"


def _is_one_word(text: str) -> bool:
    """Whether Slurm, which reads quotes as a shell does, takes it for one word."""
    try:
        return len(shlex.split(text)) <= 1
    except ValueError:  # a quote without its other half
        return False


def write_script(path: pathlib.Path, text: str, file: SpecFile) -> None:
    """Write a script, and make the folder of its logs, without which Slurm cannot start the job.

    Raises OutputError instead of replacing a file that this command has not written, such as the job's spec.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_option(path, "--script"):
        write_named(path, text.encode(), SCRIPT_MARK)
    folder_of(file).mkdir(parents=True, exist_ok=True)


def _place_error(file: SpecFile, options: SlurmOptions) -> str | None:
    """Why each Slurm job would end with exit code 2: the output folder holds a job that is cut differently."""
    if file.spec.output.is_bucket:
        return None  # the nodes may have a key that this host does not have
    num_slices = options.num_slices
    try:
        check_place(file.spec.output.path, None if num_slices is None else Slice(0, num_slices))
    except OutputError as error:
        return f"{error}" if num_slices is None else f"--array {num_slices} runs slices. {error}"
    return None


def note_lines(file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """What an option does other than the user may think."""
    yield from _idle_gpus(file, options)
    most_at_once = (options.array or "").partition("%")[2]
    if options.num_slices is not None and most_at_once and int(most_at_once) > options.num_slices:
        num_tasks = counted(options.num_slices, "task")
        yield f"note: --array {options.array}: the array has {num_tasks}, so %{most_at_once} limits nothing"


def _idle_gpus(file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """A warning about GPUs that no replica uses. With `auto` degrees, the run itself decides."""
    parallel = file.spec.parallel
    num_replicas = parallel.data_parallel_size
    degrees = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if options.gpus is None or options.num_gpus is None or file.spec.scripted is not None:
        return
    if num_replicas == "auto" or "auto" in degrees:
        return
    num_used = _num_devices(parallel)
    num_gpus = options.num_gpus * options.num_nodes
    if num_used >= num_gpus:
        return
    where = "of each task" if options.num_slices is not None else "of --gpus"
    kind, colon, _ = options.gpus.rpartition(":")
    fewer = f"--gpus {kind}{colon}{num_used}" if options.num_nodes == 1 else "fewer nodes or GPUs"
    yield (
        f"warning: {counted(num_replicas, 'replica')} of {counted(math.prod(parallel.sizes), 'GPU')} "
        f"{'uses' if num_replicas == 1 else 'use'} {num_used} of the {num_gpus} GPUs {where}; leave "
        f"parallel.data_parallel_size out for as many replicas as fit, or ask for {fewer}"
    )


def unsubmitted_lines(path: pathlib.Path, file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """What the user does with a script that was only written."""
    yield f"wrote {path}; submit it with `{_sbatch_command(path)}`, in the folder where you run batchinf"
    if (error := _place_error(file, options)) is not None:
        yield f"warning: {error}"


def submit(path: pathlib.Path, file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """Submit a script if `sbatch --test-only` accepts it, and say so. Raises UserError with sbatch's words."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"--submit: there is no sbatch here; run `{_sbatch_command(path)}` on a machine of the cluster, in the "
            f"folder {os.getcwd()}"
        )
    if (error := _place_error(file, options)) is not None:
        raise UserError(f"--submit: {error}")
    _sbatch(path, "--test-only")
    # On a federation of clusters sbatch prints `id;cluster`.
    job_id = _sbatch(path, "--parsable").strip().partition(";")[0]
    # In a log's name, `%a` stands for the number of a slice.
    log = f"{folder_of(file)}/{job_id}{'_%a' if options.num_slices is not None else ''}.log"
    yield f"wrote {path}"
    status = f"batchinf status {shlex.quote(file.spec.output.path)}"
    yield f"submitted job {job_id}; its log: {log}; its state: {status}"


def _sbatch_command(path: pathlib.Path) -> str:
    return f"sbatch {shlex.quote(str(path))}"


def _sbatch(path: pathlib.Path, option: str) -> str:
    done = subprocess.run(["sbatch", option, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.split("\n") if line.strip())
        raise UserError(f"sbatch {option} refuses {path}: {clip(errors, 500)}")
    return done.stdout
