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
from batchinf.base.slices import MAX_SLICES, Slice, refuse_other_cut
from batchinf.base.stop_signals import ENDING_S
from batchinf.base.storage import reason, write_named
from batchinf.base.text import clip
from batchinf.spec.file import SpecFile

# The beginning of a script, whose second line is `SlurmOptions.command`. `job.sbatch` is the template of all scripts.
SCRIPT_MARK = b"#!/bin/bash\n# batchinf slurm"
_CPUS_PER_GPU = 8

# Options of sbatch that the script itself needs, and what to write instead.
_ELSEWHERE = {
    "array": "each task would run the whole job: write --array 8 without --sbatch, for 8 slices",
    "signal": "the script stops the job by this signal: set stop_before_s in the spec, in seconds before the limit",
    "nodes": "write --nodes without --sbatch, so that the script starts Ray on them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of a script."""

    num_nodes: int = 1
    """More than one starts Ray."""
    array: str | None = None
    """Slices of a job array, and how many run at a time, such as `8` or `8%2`; None for no array."""
    max_requeues: int = 5
    """How often in a row a job is queued again without a new finished row."""
    gpus: str | None = None
    """Of each node, such as `4` or `a100:4`; None for none."""
    time: str | None = None
    """The time limit as Slurm writes it; None for the cluster's default."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as `mem=200G` or `exclusive`. They replace those of the script."""
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
    _check(file, options)
    settings = [word for text in options.overrides for word in ("--set", text)]
    return _template().render(
        options=options,
        directives=_directives(file, options),
        batchinf=shlex.join(["batchinf", "run", file.path, *settings]),
        container=shlex.join(_container(options)),
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


def _check(file: SpecFile, options: SlurmOptions) -> None:
    """Refuse what neither Slurm nor the run would refuse, and what would lose the signal before the time limit."""
    if options.num_nodes > 1 and options.num_slices is not None:
        raise SpecError(
            "got --array with --nodes; slices need one node each, and Ray needs no slices: give one of them"
        )
    if options.num_nodes > 1 and _container(options):
        raise SpecError(
            f"--sbatch: got {_container(options)[0][2:]} with --nodes; Pyxis makes a container for each step, and "
            "Ray's processes share one: use --array, or fill in `within=(apptainer exec --nv IMAGE)` in the script"
        )
    if options.num_slices is not None and options.num_slices > MAX_SLICES:
        raise SpecError(f"--array: got {options.num_slices}; must be at most {MAX_SLICES}")
    if options.num_slices is not None and file.spec.output.push_to_hub is not None:
        raise file.error("output.push_to_hub", "got it with --array, whose slices push nothing; leave it out")
    for text in (options.command, file.spec.output.path):
        if not text.isprintable():
            raise SpecError(
                f"got {clip(text, 200)}; an sbatch script cannot hold its control characters: leave them out"
            )
    if "\\" in file.spec.output.path:  # in the name of a log it switches off Slurm's fields such as %j
        raise file.error("output.path", f"got {clip(file.spec.output.path, 200)}; Slurm's logs allow no backslash")
    if file.spec.stop_before_s == 0:
        raise file.error("stop_before_s", "got 0; under Slurm it must be at least 1, so that the job is signalled")
    if file.spec.drain_timeout_s + ENDING_S > math.ceil(file.spec.stop_before_s):
        raise file.error(
            "drain_timeout_s",
            f"got {file.spec.drain_timeout_s:g}, but Slurm kills the job stop_before_s = {file.spec.stop_before_s:g} s "
            f"after its signal, and storing takes up to {ENDING_S:g} s; lower drain_timeout_s, or raise stop_before_s",
        )


def _log(file: SpecFile, name: str) -> str:
    """A log as Slurm names it: `%` begins a field such as the job's id."""
    return str(folder_of(file)).replace("%", "%%") + f"/{name}.log"


def _directives(file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """The options of sbatch. Slurm sends the signal up to 60 s earlier than asked."""
    fields = {
        "job-name": pathlib.Path(file.spec.output.path).name,
        "output": _log(file, "%A_%a" if options.num_slices is not None else "%j"),
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR1@{math.ceil(file.spec.stop_before_s)}",
        "array": _array(options),
        "nodes": str(options.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(_CPUS_PER_GPU * (options.num_gpus or 1)),
        "gres": None if options.gpus is None else f"gpu:{options.gpus}",
        "time": options.time,
        # Ray's other nodes go on without a node that fails.
        "no-kill": "" if options.num_nodes > 1 else None,
        **{key: value for key, value in _further(options) if not _is_of_pyxis(key)},
    }
    for option, value in fields.items():
        if value is not None:
            yield f"--{option}" + (f"={shlex.quote(value)}" if value else "")


def _is_of_pyxis(key: str) -> bool:
    return key.startswith(("container-", "no-container-"))


def _container(options: SlurmOptions) -> list[str]:
    """Options of Pyxis, for `srun`: as directives they would run the script in the container, where no srun is."""
    return [f"--{key}={value}".rstrip("=") for key, value in _further(options) if _is_of_pyxis(key)]


def _array(options: SlurmOptions) -> str | None:
    if options.num_slices is None or options.array is None:
        return None
    _, percent, most_at_once = options.array.partition("%")
    return f"0-{options.num_slices - 1}{percent}{most_at_once}"


def _further(options: SlurmOptions) -> Iterator[tuple[str, str]]:
    """Names and values of `--sbatch`. Raises SpecError."""
    for text in options.sbatch:
        allowed = "an option of sbatch by its long name, such as mem=200G or exclusive"
        key, value = _matched("--sbatch", text, r"([a-z][a-z-]+)(?:=(.+))?", allowed).groups(default="")
        # sbatch takes the beginning of a name, too.
        own = next((name for name in _ELSEWHERE if name.startswith(key)), None)
        if own is not None and not (own == "array" and options.array is not None):
            raise SpecError(f"--sbatch: got {clip(text)!r}; {_ELSEWHERE[own]}")
        yield key, value


def write_script(path: pathlib.Path, text: str) -> None:
    """Write a script into the folder of its logs, without which Slurm cannot start the job.

    Raises OutputError, also instead of replacing a file that this command has not written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_named(path, text.encode(), SCRIPT_MARK)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}") from error


def _place_error(file: SpecFile, options: SlurmOptions) -> str | None:
    """Why each Slurm job would end with exit code 2: the output folder holds a job that is cut differently."""
    if file.spec.output.is_bucket:
        return None  # the nodes may have a key that this host does not have
    num_slices = options.num_slices
    try:
        refuse_other_cut(file.spec.output.path, None if num_slices is None else Slice(0, num_slices))
    except OutputError as error:
        return f"{error}" if num_slices is None else f"--array {num_slices} runs slices. {error}"
    return None


def unsubmitted_lines(path: pathlib.Path, file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """What the user does with a script that was only written."""
    yield f"wrote {path}; submit it with `{_sbatch_command(path)}`, in the folder where you run batchinf"
    if (error := _place_error(file, options)) is not None:
        yield f"warning: {error}"


def submit(path: pathlib.Path, file: SpecFile, options: SlurmOptions) -> Iterator[str]:
    """Submit a script, and say so. Raises UserError with sbatch's words."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"--submit: there is no sbatch here; run `{_sbatch_command(path)}` on a machine of the cluster, in the "
            f"folder {os.getcwd()}"
        )
    if (error := _place_error(file, options)) is not None:
        raise UserError(f"--submit: {error}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.split("\n") if line.strip())
        raise UserError(f"sbatch refuses {path}: {clip(errors, 500)}")
    # On a federation of clusters sbatch prints `id;cluster`.
    job_id = done.stdout.strip().partition(";")[0]
    # In a log's name, `%a` stands for the number of a slice.
    log = f"{folder_of(file)}/{job_id}{'_%a' if options.num_slices is not None else ''}.log"
    yield f"wrote {path}"
    status = f"batchinf status {shlex.quote(file.spec.output.path)}"
    yield f"submitted job {job_id}; its log: {log}; its state: {status}"


def _sbatch_command(path: pathlib.Path) -> str:
    return f"sbatch {shlex.quote(str(path))}"
