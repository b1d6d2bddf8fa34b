"""The job spec: every field, its meaning, unit and default, and what changing it on a resume means.

Each field is *identity* (a change is refused on resume), *layout* (chosen once, then frozen) or *runtime* (free).
Reading YAML, overriding and reporting errors with line and column live in `spec_file`.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

Resume = Literal["identity", "layout", "runtime"]

IDENTITY = Field(json_schema_extra={"resume": "identity"})
LAYOUT = Field(json_schema_extra={"resume": "layout"})
RUNTIME = Field(json_schema_extra={"resume": "runtime"})


def _wrong(reason: str, field: str = "") -> PydanticCustomError:
    # What a validator raises: `field` is the one to look at, below the section or field that is validated.
    return PydanticCustomError("wrong", "{reason}", {"reason": reason, "field": field})


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise _wrong(f"got {path!r}; a path cannot hold a null character")
    if path.startswith("~"):
        raise _wrong(f"got {path!r}, but there is no such user's home; for a name that begins with ~ write ./~")
    return path


# What vLLM and Arrow hold in 32 bits, and seconds that a clock can wait, are bounded here, so that nothing overflows.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_usable_path)]
# Strictness would refuse a list where a tuple is kept; the items stay strict.
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
TokenIds = Annotated[tuple[Whole, ...], Field(strict=False)]

# Fields in which environment variables and ~ are expanded when a spec is read from a file.
PATH_FIELDS = (("model", "name"), ("model", "tokenizer"), ("input", "path"), ("output", "path"))

# Engine arguments that change how fast, not what: free on a resume. All others are identity.
RUNTIME_ENGINE_ARGUMENTS = frozenset(
    """max_num_seqs max_num_batched_tokens gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override
    enable_prefix_caching block_size distributed_executor_backend max_parallel_loading_workers cpu_offload_gb
    swap_space disable_custom_all_reduce enable_chunked_prefill async_scheduling enforce_eager compilation_config
    disable_log_stats scheduler_cls download_dir kv_offloading_size kv_offloading_backend worker_extension_cls
    """.split()
)

# Engine arguments that the spec names elsewhere, with the field that does.
ENGINE_ARGUMENTS_ELSEWHERE = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "load_format": "model.load_format",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "parallel.tensor_parallel_size",
    "pipeline_parallel_size": "parallel.pipeline_parallel_size",
    "data_parallel_size": "parallel.data_parallel_size",
    "hf_token": "HF_TOKEN in the environment",  # what the spec says is recorded
}


def _as_tuple(texts: tuple[str, ...] | str) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


class Section(BaseModel):
    """Base of every mapping in a spec: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSpec(Section):
    """Which weights, and how they are loaded."""

    name: Annotated[Path, RUNTIME]
    """A Hugging Face id or a folder. Known on resume by its content or commit, not by where it lies."""
    revision: Annotated[Text | None, IDENTITY] = None
    """Branch, tag or commit of a Hugging Face id."""
    tokenizer: Annotated[Path | None, IDENTITY] = None
    """A Hugging Face id or a folder; default: the model's own."""
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], IDENTITY] = "auto"
    """Type of the weights and of the arithmetic; `auto` is what the model's config says."""
    quantization: Annotated[Text | None, IDENTITY] = None
    """vLLM's name of a quantization method, such as `fp8`; default: what the model's config says."""
    load_format: Annotated[Text, IDENTITY] = "auto"
    """vLLM's weight format; `dummy` gives random weights in the model's shape."""
    trust_remote_code: Annotated[bool, IDENTITY] = False
    """Run Python code that comes with the model. Only for models that you trust as you trust a program."""


class InputSpec(Section):
    """Where the rows come from, and what of a row is the prompt."""

    path: Annotated[Path, RUNTIME]
    """A file, a glob, a folder, or a Hugging Face dataset id. Known on resume by its content."""
    format: Annotated[Literal["jsonl", "parquet", "csv", "text", "arrow", "hf"] | None, RUNTIME] = None
    """Default: told from the name's ending."""
    split: Annotated[Text | None, IDENTITY] = None
    """Split of a Hugging Face dataset; default `train`."""
    name: Annotated[Text | None, IDENTITY] = None
    """Configuration of a Hugging Face dataset."""
    revision: Annotated[Text | None, IDENTITY] = None
    """Revision of a Hugging Face dataset."""
    prompt_column: Annotated[Text | None, IDENTITY] = None
    """The column that holds the prompt, as text; default `prompt`, unless `prompt_template` is given."""
    prompt_template: Annotated[Text | None, IDENTITY] = None
    """A Jinja2 template over the row's columns, in place of `prompt_column`."""
    id_column: Annotated[Text | None, IDENTITY] = None
    """The column that is carried to the output as `id`, in its own type."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt_column is not None and self.prompt_template is not None:
            raise _wrong("got a template beside prompt_column; give one of them", "prompt_template")
        return self

    @model_validator(mode="after")
    def _hub_only(self) -> Self:
        for field in ("split", "name", "revision"):
            if self.format not in (None, "hf") and getattr(self, field) is not None:
                raise _wrong(f"got {getattr(self, field)!r} with format {self.format}; only a Hugging Face dataset "
                             f"(format hf) has a {field}: leave it out", field)  # fmt: skip
        return self


class SamplingSpec(Section):
    """vLLM's sampling parameters under vLLM's names. Unset ones come from the model's generation_config."""

    n: Annotated[Positive, IDENTITY] = 1
    """Samples for each row; each is an output row with its own `sample_index` and seed."""
    temperature: Annotated[float | None, Field(ge=0, le=2), IDENTITY] = None
    """0 is greedy."""
    top_p: Annotated[float | None, Field(gt=0, le=1), IDENTITY] = None
    """Nucleus sampling: the smallest set of tokens whose probabilities reach this."""
    top_k: Annotated[Whole | None, IDENTITY] = None
    """Sample from this many likeliest tokens; 0 is all."""
    min_p: Annotated[float | None, Field(ge=0, le=1), IDENTITY] = None
    """Least probability relative to the likeliest token."""
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2), IDENTITY] = None
    """Penalty on tokens that stand in the output already."""
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2), IDENTITY] = None
    """Penalty on tokens by how often they stand in the output already."""
    repetition_penalty: Annotated[float | None, Field(gt=0), IDENTITY] = None
    """Factor on tokens that stand in the prompt or the output; 1 is none."""
    max_tokens: Annotated[Positive | None, IDENTITY] = None
    """Most output tokens for a sample; default: what fits `max_model_len`."""
    min_tokens: Annotated[Whole, IDENTITY] = 0
    """Least output tokens before a stop is heeded."""
    stop: Annotated[Texts | Text, AfterValidator(_as_tuple), IDENTITY] = ()
    """Strings that end a sample. Each costs decoding in the engine."""
    stop_token_ids: Annotated[TokenIds, IDENTITY] = ()
    """Token ids that end a sample, beside the model's own."""
    include_stop_str_in_output: Annotated[bool, IDENTITY] = False
    """Keep the stop string in the text."""
    ignore_eos: Annotated[bool, IDENTITY] = False
    """Go on after the end-of-sequence token."""
    skip_special_tokens: Annotated[bool, IDENTITY] = True
    """Leave special tokens out of the text."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), IDENTITY] = 0
    """The job's seed; each sampled request's own is a hash of it, the row and the request."""
    logprobs: Annotated[int | None, Field(ge=0, le=1000), IDENTITY] = None
    """Store each output token's logprob and rank, and those of this many likeliest tokens; unset: none."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=1000), IDENTITY] = None
    """The same for the prompt's tokens."""

    @model_validator(mode="after")
    def _greedy_is_one(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise _wrong(f"got {self.n} with temperature 0; greedy samples are all equal: set n to 1, "
                         "or a temperature above 0", "n")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _least_below_most(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong(f"got {self.min_tokens} with max_tokens {self.max_tokens}; must not be above it", "min_tokens")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        return _as_tuple(self.stop)


class ParallelSpec(Section):
    """Degrees of parallelism; a replica takes tensor × pipeline devices."""

    tensor_parallel_size: Annotated[Positive, RUNTIME] = 1
    """Devices that share each layer."""
    pipeline_parallel_size: Annotated[Positive, RUNTIME] = 1
    """Devices that share the layers among them."""
    data_parallel_size: Annotated[Positive | Literal["auto"], RUNTIME] = "auto"
    """Replicas; `auto` is as many as the visible devices hold, or 2 on a CPU."""


class OutputSpec(Section):
    """What is written, and where."""

    path: Annotated[Path, RUNTIME]
    """The job's output folder."""
    rows_per_shard: Annotated[Positive | Literal["auto"], LAYOUT] = "auto"
    """Rows in one Parquet part; `auto` aims at 64 MiB."""
    logprobs_dtype: Annotated[Literal["float32", "float16"], IDENTITY] = "float32"
    """Stored type of logprobs."""
    include_prompt: Annotated[bool, IDENTITY] = False
    """Store the rendered `prompt` and its `prompt_token_ids`."""
    include_token_ids: Annotated[bool, IDENTITY] = True
    """Store `token_ids`."""
    keep_columns: Annotated[Texts, IDENTITY] = ()
    """Input columns to carry to the output."""

    @field_validator("keep_columns")
    @classmethod
    def _each_once(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            if columns.count(column) > 1:
                raise _wrong(f"got {column!r} twice; name each column once")
        return columns


class ScriptedSpec(Section):
    """The deterministic stand-in for vLLM: tries a job's plumbing at full speed without running a model."""

    max_num_seqs: Annotated[Positive, RUNTIME] = 256
    """Requests in one step."""
    step_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 0.0
    """Least time of one step."""
    start_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 0.0
    """Time that the engine takes to start."""
    max_model_len: Annotated[Positive, IDENTITY] = 2048
    """Longest prompt and output together, in tokens."""
    vary_lengths: Annotated[bool, IDENTITY] = True
    """Outputs end at a length drawn from the prompt's hash; else all reach `max_tokens`."""


class JobSpec(Section):
    """One job: a model, a task, rows and an output folder."""

    model: ModelSpec
    task: Annotated[Literal["generate"], IDENTITY] = "generate"
    """What is done with each row."""
    input: InputSpec
    sampling: SamplingSpec = SamplingSpec()
    parallel: ParallelSpec = ParallelSpec()
    engine: Annotated[dict[str, Any], IDENTITY] = Field(default_factory=dict)
    """vLLM's EngineArgs by name, such as `max_model_len` or `gpu_memory_utilization`."""
    output: OutputSpec
    checkpoint_interval_s: Annotated[float, Field(gt=0, le=10**9), RUNTIME] = 10.0
    """A crash costs at most this many seconds of finished requests."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 20.0
    """When stopped on request, how long running requests may take to finish; after SIGTERM at most 20 s."""
    stop_before_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 120.0
    """In a Slurm job, how long ahead of its time limit to stop as if on request; its 75 asks for another run."""
    stall_timeout_s: Annotated[float, Field(gt=0, le=10**9), RUNTIME] = 900.0
    """A replica whose engine makes no step for so long is ended and started again."""
    max_restarts: Annotated[Whole, RUNTIME] = 3
    """Restarts of one replica without a finished request between them before it is given up."""
    on_oom: Annotated[Literal["step_down", "fail"], RUNTIME] = "step_down"
    """When memory runs out: start the engine again with lower batch limits and share of the memory, or give up."""
    max_error_rate: Annotated[float, Field(ge=0, le=1), RUNTIME] = 0.01
    """Share of error rows above which a finished job exits with 3; below 0.5, half of the first 1,000 end it early."""
    scripted: Annotated[ScriptedSpec | None, IDENTITY] = None
    """Run the scripted engine in place of vLLM."""

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
        for argument, value in engine.items():
            if not _is_json({argument: value}):
                raise _wrong("must be made of text, finite numbers, true or false, null, lists and mappings", argument)
        share = engine.get("gpu_memory_utilization", 0.5)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise _wrong(f"got {share!r}; must be a number above 0 and at most 1", "gpu_memory_utilization")
        return engine

    @property
    def prompt_column(self) -> str:
        """The column that holds the prompt, where no template is given."""
        return self.input.prompt_column or "prompt"


def fields(spec: JobSpec, resume: Resume) -> dict[str, Any]:
    """All fields of one kind as `{"sampling.top_p": 0.9, ...}`, JSON values only."""
    return {name: value for name, value, kind in _walk(spec) if kind == resume}


def fingerprint(identity: dict[str, Any]) -> str:
    """32 hexadecimal digits that stand for an identity."""
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
            yield f"{prefix}{name}", _plain(value), resume_of(info.json_schema_extra, f"{prefix}{name}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def resume_of(extra: Any, name: str) -> Resume:
    """What a field's `json_schema_extra` says of a change. Raises TypeError where it says nothing."""
    kind = (extra or {}).get("resume")
    if kind not in ("identity", "layout", "runtime"):
        raise TypeError(f"spec field {name} does not say what a change on resume means")
    return kind  # type: ignore[no-any-return]


def _is_json(value: Any) -> bool:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return bool(json.loads(text.encode()) == value)
    except (TypeError, ValueError):
        return False
