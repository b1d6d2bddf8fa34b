"""The job spec: each field with its meaning, unit, default and kind (identity, layout or runtime).

`tasks.registry` adds the tasks and their sections with `add_tasks`. `spec.file` reads specs from YAML.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, field_validator, model_validator

from batchinf.base.paths import elsewhere
from batchinf.spec.fields import (
    IDENTITY,
    LAYOUT,
    RUNTIME,
    Path,
    Positive,
    Resume,
    Section,
    Text,
    Whole,
    is_json,
    null_hint,
    on_this_host,
    resume_of,
    wrong,
)
from batchinf.spec.input import InputSpec
from batchinf.spec.output import OutputSpec
from batchinf.spec.retry import RetrySpec
from batchinf.spec.sampling import SamplingSpec

# `spec.file` expands environment variables and ~ in these fields.
PATH_FIELDS = (
    ("model", "name"),
    ("model", "tokenizer"),
    ("model", "lora"),
    ("input", "path"),
    ("output", "path"),
    ("output", "work_dir"),
)

# Engine arguments that change the speed but not the output, so a resume may change them. All others are identity.
RUNTIME_ENGINE_ARGUMENTS = frozenset(
    """max_num_seqs max_num_batched_tokens gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override
    enable_prefix_caching block_size distributed_executor_backend max_parallel_loading_workers cpu_offload_gb
    swap_space disable_custom_all_reduce enable_chunked_prefill async_scheduling enforce_eager compilation_config
    disable_log_stats scheduler_cls download_dir kv_offloading_size kv_offloading_backend worker_extension_cls
    worker_cls max_loras max_cpu_loras max_lora_rank watermark
    """.split()
)

# The number of today's rules by which files become rows, prompts and seeds. A change that gives a job other rows,
# prompts or seeds raises it, and keeps the old rule for jobs that began with a lower number.
RULES = 3
OLDEST_RULES = 2  # that rows can run by; of jobs that began by rules 1, only finished ones are read
RULES_OF_ATTEMPTS = 3  # the first by which the number of an attempt enters the seeds of rows that run again

# The key in the engine argument `additional_config` by which batchinf asks for CUDA graphs of whole steps of prompts.
WHOLE_STEPS = "batchinf_whole_steps"

# Engine arguments that are refused under `engine` → the field to write instead.
ENGINE_ARGUMENTS_ELSEWHERE = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "load_format": "model.load_format",
    "trust_remote_code": "model.trust_remote_code",
    "reasoning_parser": "model.reasoning_parser",
    "logprobs_mode": "sampling.logprobs_mode",
    "tensor_parallel_size": "parallel.tensor_parallel_size",
    "pipeline_parallel_size": "parallel.pipeline_parallel_size",
    "data_parallel_size": "parallel.data_parallel_size",
    "hf_token": "HF_TOKEN in the environment",  # the spec is stored in the output folder
}
# Engine arguments that are refused in a job with images → why, and what to write instead.
_OF_IMAGES = {
    "limit_mm_per_prompt": "set input.images.max_per_row",
    "mm_processor_cache_gb": "vLLM's cache of images would lose those of rows that run later: leave it out",
    "enable_prompt_embeds": "leave it out",
    "language_model_only": "vLLM would run the model without images: leave it out",
}


HubOrPath = Annotated[Path, on_this_host("give a Hugging Face id, or fetch the files and give their folder")]


class ModelSpec(Section):
    """The model and how its weights are loaded."""

    name: Annotated[HubOrPath, RUNTIME]
    """A Hugging Face id or a folder. A resume uses the same commit of an id. All bytes identify a local model."""
    revision: Annotated[Text | None, IDENTITY] = None
    """Branch, tag or commit of a Hugging Face id."""
    tokenizer: Annotated[HubOrPath | None, IDENTITY] = None
    """A Hugging Face id or a folder; default: the model's tokenizer."""
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], IDENTITY] = "auto"
    """Type of the weights and of the arithmetic; `auto`: from the model's config."""
    quantization: Annotated[Text | None, IDENTITY] = None
    """vLLM's name of a quantization method, such as `fp8`; default: from the model's config."""
    load_format: Annotated[Text, IDENTITY] = "auto"
    """vLLM's weight format; `dummy` gives random weights in the model's shape."""
    trust_remote_code: Annotated[bool, IDENTITY] = False
    """Run Python code of the model. Use it only if you would run a program of the model's author."""
    reasoning_parser: Annotated[Text | None, IDENTITY] = None
    """vLLM's name of a reasoning parser, such as `qwen3`. The reasoning goes to the column `reasoning`."""
    tool_parser: Annotated[Text | None, IDENTITY] = None
    """vLLM's name of a parser of tool calls, such as `hermes`; `auto`: by the model's type. The calls go to the column
    `tool_calls`."""
    lora: Annotated[Annotated[dict[Text, HubOrPath], Field(min_length=1)] | HubOrPath | None, RUNTIME] = None
    """A LoRA adapter for all rows: a folder or a Hugging Face id. Or several: a mapping from names to adapters;
    `input.adapter_column` then names the adapter of each row. All bytes of a folder's files identify it. A resume
    uses the same commit of an id."""


def _each_device_once(devices: tuple[int | str, ...]) -> tuple[int | str, ...]:
    names = [str(device) for device in devices]
    for name in names:
        if names.count(name) > 1:
            raise wrong(f"got {name} twice; name each device once")
    return devices


Devices = Annotated[tuple[Whole | Text, ...], Field(strict=False, min_length=1), AfterValidator(_each_device_once)]


class ParallelSpec(Section):
    """Degrees of parallelism. A replica uses tensor × pipeline devices."""

    tensor_parallel_size: Annotated[Positive | Literal["auto"], RUNTIME] = 1
    """Devices over which each layer is split; `auto`: the fewest that hold the model, or more where that is faster."""
    pipeline_parallel_size: Annotated[Positive | Literal["auto"], RUNTIME] = 1
    """Devices over which the layers are distributed; `auto`: 1, unless no tensor-parallel size fits. Only for CUDA
    devices: vLLM has no pipelines on a CPU."""
    replicas_per_device: Annotated[Positive | Literal["auto"], RUNTIME] = "auto"
    """Replicas that share a CUDA device; `auto`: 2 for a small model that only reads prompts from a large input,
    otherwise 1."""
    devices: Annotated[Devices | None, RUNTIME] = None
    """The CUDA devices of this job, named as in `nvidia-smi` and `CUDA_VISIBLE_DEVICES`, such as `[0, 1]`; default: all
    that `CUDA_VISIBLE_DEVICES` lets it see. Jobs on other devices can run beside it."""
    data_parallel_size: Annotated[Positive | Literal["auto"], RUNTIME] = "auto"
    """Number of replicas; `auto`: as many as the visible devices hold; on a CPU 2, or 1 with at most four cores.
    With `backend: ray`, `auto` is as many as the cluster has room for at the start; without GPUs, one on each node."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Tensor and pipeline-parallel size; 1 for `auto`, as long as no devices are known."""
        tensor = self.tensor_parallel_size
        pipeline = self.pipeline_parallel_size
        return 1 if tensor == "auto" else tensor, 1 if pipeline == "auto" else pipeline


# Part of a variable's name: its value must not be in any file, and the spec is stored.
SECRET_NAME = "(?i)TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH"


class RaySpec(Section):
    """The Ray cluster of `backend: ray`. See docs/cluster.md."""

    address: Annotated[Text | None, RUNTIME] = None
    """Address of the cluster's head, such as `10.0.0.1:6379`, or `auto` for the cluster that this host belongs to.
    Default: the environment variable `RAY_ADDRESS`."""
    resources: Annotated[dict[Text, Annotated[float, Field(ge=0, le=10**9)]], RUNTIME] = Field(default_factory=dict)
    """What a replica asks for besides its GPUs, by Ray's names, such as `{CPU: 8, memory: 2e10}`; if it has several
    hosts, on the first one. Without `CPU`, it asks for 1 CPU for each GPU, or 1 without GPUs."""
    env_vars: Annotated[dict[Text, str], RUNTIME] = Field(default_factory=dict)
    """Environment variables of the replicas. They override those of the nodes. Do not put secrets here."""
    placement_timeout_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 600.0
    """Stop with exit code 75 if the nodes that are left can hold no replica for this many seconds."""

    @field_validator("address")
    @classmethod
    def _of_a_driver(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise wrong(f"got {address!r}, the address of a Ray Client or a dashboard; batchinf runs on a host of the "
                        "cluster: write host:port of its head, or auto")  # fmt: skip
        return address

    @field_validator("resources")
    @classmethod
    def _without_gpus(cls, resources: dict[str, float]) -> dict[str, float]:
        if "GPU" in resources:
            raise wrong("must not name GPU: a replica asks for tensor × pipeline GPUs", "GPU")
        return resources

    @field_validator("env_vars")
    @classmethod
    def _without_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if re.search(SECRET_NAME, name):
                raise wrong("is named like a secret, and the spec is stored; set it where batchinf or the Ray node is "
                            "started", name)  # fmt: skip
        return variables


class ScriptedSpec(Section):
    """A deterministic engine in place of vLLM. It tries all steps of a job at full speed, without a model."""

    max_num_seqs: Annotated[Positive, RUNTIME] = 256
    """Requests in one step of the engine."""
    step_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 0.0
    """Minimum time of one step, in seconds."""
    start_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 0.0
    """Time that the engine takes to start, in seconds."""
    max_model_len: Annotated[Positive, IDENTITY] = 2048
    """Maximum length of prompt and output together, in tokens."""
    vary_lengths: Annotated[bool, IDENTITY] = True
    """The length of an output depends on the prompt's hash; if false, all outputs reach `max_tokens`."""
    device: Annotated[Text, RUNTIME] = "none"
    """Name of the device that the engine reports."""


@dataclass(frozen=True, slots=True)
class TaskSection:
    """A section of the spec that belongs to one task, or to several similar tasks."""

    name: str
    """Of the field in `JobSpec`, as `annotation` and `default`."""
    annotation: Any
    default: Any
    check: Callable[["JobSpec"], None]
    """Raises the error of `wrong` if the section does not fit the task and the rest of the spec. It runs for every
    task, so that it can refuse a section that belongs to another task."""
    meaning: str | None = None
    """None: the docstring of the section's class."""


_task_names: list[str] = []
_task_sections: list[TaskSection] = []


def _check_engine_numbers(engine: dict[str, Any]) -> None:
    """Raise an error for a validator if a number that batchinf itself reads is none."""
    share = engine.get("gpu_memory_utilization", 0.5)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise wrong(f"got {share!r}; must be a number above 0 and at most 1", "gpu_memory_utilization")
    length = engine.get("max_model_len", 1)
    if isinstance(length, str) and length != "auto":
        raise wrong(f"got {length!r}; must be a whole number, or auto{null_hint(length)}", "max_model_len")


class JobSpec(Section):
    """One job: a model, a task, rows and an output folder."""

    model: ModelSpec
    task: Annotated[str, IDENTITY]
    """What the job computes from each row. Without it, the first line of an OpenAI batch file decides."""
    input: InputSpec
    sampling: SamplingSpec = SamplingSpec()
    # The sections of the tasks follow here.
    parallel: ParallelSpec = ParallelSpec()
    backend: Annotated[Literal["local", "ray"], RUNTIME] = "local"
    """Where the replicas run: on this host, or on the nodes of a Ray cluster. A resume may change it."""
    ray: RaySpec = RaySpec()
    engine: Annotated[dict[str, Any], IDENTITY] = Field(default_factory=dict)
    """vLLM's EngineArgs by name, such as `gpu_memory_utilization`. `max_model_len: auto` is the length of the longest
    row with its output."""
    output: OutputSpec
    checkpoint_interval_s: Annotated[float, Field(gt=0, le=10**9), RUNTIME] = 10.0
    """A crash costs at most this many seconds of finished requests."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 20.0
    """Seconds that running requests get to finish after a signal to stop the job; at most 20 s after SIGTERM."""
    stop_before_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 120.0
    """How many seconds before its time limit the script of `batchinf slurm` lets Slurm signal the job to stop."""
    stall_timeout_s: Annotated[float, Field(ge=2, le=10**9), RUNTIME] = 900.0
    """Restart a replica if its engine makes no step for this many seconds. Replicas report their steps every second."""
    start_timeout_s: Annotated[float, Field(ge=2, le=10**9), RUNTIME] = 1800.0
    """Restart a replica if its start makes no progress for this many seconds: no message, no line in its log, no MiB
    read by its processes. It replaces vLLM's own 600 s, unless you set VLLM_ENGINE_READY_TIMEOUT_S."""
    max_restarts: Annotated[Whole, RUNTIME] = 3
    """Give up a replica after this many restarts without a finished request between them."""
    on_oom: Annotated[Literal["step_down", "fail"], RUNTIME] = "step_down"
    """If memory runs out: restart the engine with lower batch limits and a lower share of the memory, or give up."""
    max_error_rate: Annotated[float, Field(ge=0, le=1), RUNTIME] = 0.01
    """Exit with code 3 above this share of error rows. If it is below 0.5, a job ends early if half of the first 1,000
    rows fail."""
    retry: Annotated[RetrySpec | None, RUNTIME] = None
    """Run rows again that failed or that SQL names, in the same run, when all rows are done."""
    price_per_gpu_hour: Annotated[float | None, Field(ge=0, le=10**9), RUNTIME] = None
    """Price of one GPU for an hour. With it, `plan`, `status` and `report` say what the job costs; the last two take
    the price with which the job began. Their `--price` wins."""
    same_device: Annotated[bool, RUNTIME] = False
    """Refuse a replica if its device or its version of vLLM, torch, transformers or CUDA differs from before."""
    scripted: Annotated[ScriptedSpec | None, IDENTITY] = None
    """Run the scripted engine instead of vLLM, to try a job without a model."""
    rules: Annotated[int, Field(ge=OLDEST_RULES, le=RULES), LAYOUT] = RULES
    """The number of the rules by which files become rows, prompts and seeds. A job keeps those with which it began."""

    @model_validator(mode="before")
    @classmethod
    def _short_model(cls, data: Any) -> Any:
        # `model: name` is short for `model: {name: name}`.
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            return {**data, "model": {"name": data["model"]}}
        return data

    @field_validator("engine")
    @classmethod
    def _plain_engine(cls, engine: dict[str, Any]) -> dict[str, Any]:
        speculative = engine.get("speculative_config")
        draft = speculative.get("model") if isinstance(speculative, dict) else None
        for argument, value in {**engine, "speculative_config.model": draft}.items():
            if not is_json({argument: value}):
                raise wrong("must be made of text, finite numbers, true or false, null, lists and mappings", argument)
            if isinstance(value, str) and (message := elsewhere(value, "give a path here")) is not None:
                raise wrong(message, argument)
        _check_engine_numbers(engine)
        return engine

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for section in _task_sections:
            section.check(self)
        if self.backend == "ray":
            self._check_ray()
        takes_budget = self.model.reasoning_parser is not None or "reasoning_config" in self.engine
        if self.sampling.may_have("thinking_token_budget") and not takes_budget:
            raise wrong("must be left out, or stand beside model.reasoning_parser or engine.reasoning_config, which "
                        "say where the reasoning ends", "sampling.thinking_token_budget")  # fmt: skip
        self._check_adapters()
        self._check_tools()
        if self.retry is not None:
            self.retry.check(self.sampling)
        if self.input.has_images:
            self._check_images()
        return self

    def _check_ray(self) -> None:
        if self.output.is_bucket:
            raise wrong("got ray, whose nodes share a folder, with a bucket as output.path: run each node's share of "
                        "the rows with backend: local and --slice i/N, or give a shared folder", "backend")  # fmt: skip
        if self.parallel.devices is not None:
            raise wrong("got a list with backend: ray; Ray chooses the devices: leave it out", "parallel.devices")

    def _check_adapters(self) -> None:
        lora = self.model.lora
        column = self.input.adapter_column
        if column is not None and not isinstance(lora, dict):
            are_there = "are no adapters to name" if lora is None else "is one adapter for all rows"
            raise wrong(f"got {column!r}, but there {are_there}; write model.lora: {{name: folder}}",
                        "input.adapter_column")  # fmt: skip
        if isinstance(lora, dict) and len(lora) > 1 and column is None:
            raise wrong(f"got {len(lora)} adapters, but nothing says which of them a row has; name the column that "
                        "does in input.adapter_column", "model.lora")  # fmt: skip
        if lora is not None and self.engine.get("enable_lora") is False:
            raise wrong("got false with model.lora; leave it out", "engine.enable_lora")

    def _check_images(self) -> None:
        if self.has_auto_length:
            raise wrong("got auto in a job with images, whose lengths are known only when it runs; give a number",
                        "engine.max_model_len")  # fmt: skip
        for argument, instead in _OF_IMAGES.items():
            if argument in self.engine:
                raise wrong(f"got it in a job with images; {instead}", f"engine.{argument}")

    def _check_tools(self) -> None:
        parser = self.model.tool_parser
        where = self.input
        choice = where.tool_choice
        if parser is None and choice not in (None, "none"):
            raise wrong(f"got {choice!r}, but nothing says how the model writes its calls: name the parser in "
                        "model.tool_parser, such as hermes, or auto", "input.tool_choice")  # fmt: skip
        if parser is not None and "tools" in (where.chat_template_kwargs or {}):
            raise wrong("got them with model.tool_parser, which would not see them; give them as input.tools",
                        "input.chat_template_kwargs.tools")  # fmt: skip
        if choice not in (None, "none", "auto") and self.sampling.structured_outputs is not None:
            raise wrong(f"got it with input.tool_choice {choice}, which forces a call in its place; leave out one of "
                        "them", "sampling.structured_outputs")  # fmt: skip

    def rows_may_set(self, field: str) -> bool:
        """Whether a row may have its own value of a field: by `sampling.columns`, or as a line of a batch file."""
        return self.input.is_batch_file or field in self.sampling.columns

    @property
    def may_have_structures(self) -> bool:
        """Whether a row's text may have to follow a structure: the job's, the row's own, or that of a tool call."""
        has_own = self.rows_may_set("structured_outputs") or self.model.tool_parser is not None
        return self.sampling.may_have("structured_outputs") or has_own

    @property
    def engine_needs(self) -> tuple[bool, bool]:
        """What fields of `sampling` that a retry may change decide of the engine's arguments."""
        return self.may_have_structures, self.sampling.may_have("thinking_token_budget")

    @property
    def has_auto_length(self) -> bool:
        """Whether `engine.max_model_len` is still `auto`: the longest row will say it. See `job.model_len`."""
        return self.engine.get("max_model_len") == "auto"

    def length_limit(self, of_model: int | None) -> int | None:
        """Tokens of the engine's longest sequence, as far as they are known without the engine.

        of_model: by the model's config; the scripted engine has its own.
        """
        length = self.engine.get("max_model_len")
        number = length if isinstance(length, int) and length > 0 else None
        if self.scripted is None:
            return number or of_model
        return min(number or self.scripted.max_model_len, self.scripted.max_model_len)

    @property
    def prompt_column(self) -> str:
        """The column that holds the prompt, if no template is given."""
        where = self.input
        return where.prompt_column or where.context_column or where.text_column or where.query_column or "prompt"


def is_task_section(name: str) -> bool:
    """Whether a section of the spec belongs to a task."""
    return any(section.name == name for section in _task_sections)


def add_tasks(tasks: Iterable[tuple[str, TaskSection | None]]) -> None:
    """Add tasks to `JobSpec`: their names, and their sections after `sampling`. The first task is the default.

    `tasks.registry` calls it when it is imported, before any spec is read.
    """
    for name, section in tasks:
        _task_names.append(name)
        if section is not None and section not in _task_sections:
            _task_sections.append(section)
    allowed: Any = Literal[tuple(_task_names)]
    definitions: dict[str, Any] = {
        section.name: (section.annotation, Field(section.default, description=section.meaning))
        for section in _task_sections
    }
    definitions["task"] = (Annotated[allowed, IDENTITY], Field(_task_names[0]))
    sections = create_model("_Added", __base__=Section, **definitions).model_fields
    others = {name: info for name, info in JobSpec.model_fields.items() if name not in sections}
    JobSpec.model_fields.clear()
    for name, info in others.items():
        JobSpec.model_fields[name] = info
        if name == "model":
            JobSpec.model_fields["task"] = sections.pop("task")
        elif name == "sampling":
            JobSpec.model_fields.update(sections)
    JobSpec.model_rebuild(force=True)


def fields(spec: JobSpec, resume: Resume) -> dict[str, Any]:
    """All fields of one kind, as `{"sampling.top_p": 0.9, ...}` with JSON values."""
    return {name: value for name, value, kind in _walk(spec) if kind == resume}


def fingerprint(identity: dict[str, Any]) -> str:
    """Hash of an identity: 32 hexadecimal digits."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _walk(section: Section, prefix: str = "") -> Iterator[tuple[str, Any, Resume]]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _walk(value, f"{prefix}{name}.")
        elif name == "engine" and not prefix:
            for argument, setting in sorted(value.items()):
                kind: Resume = "runtime" if argument in RUNTIME_ENGINE_ARGUMENTS else "identity"
                yield f"engine.{argument}", setting, kind
        else:
            # A comparison of mappings ignores the order of keys. The order of columns matters, so this is a list.
            if name == "keep_columns":
                value = [old if old == new else [old, new] for old, new in value.items()]
            yield f"{prefix}{name}", _json_value(value), resume_of(info.json_schema_extra, f"{prefix}{name}")


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}  # JSON has no numbers as keys
    return value.model_dump(mode="json") if isinstance(value, Section) else value
