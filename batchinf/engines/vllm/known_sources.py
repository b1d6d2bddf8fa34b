"""Which pieces of this package run with a vLLM: those that were compared with the source of the methods they rely on.

A piece repeats, wraps or replaces methods of vLLM. It runs if all of them are as in one of the versions that were read.
Comments, formatting, docstrings, annotations and the version's number do not matter. Imports nothing of vLLM.

    python -m batchinf.engines.vllm.known_sources            # the installed vLLM
    python -m batchinf.engines.vllm.known_sources FOLDER...  # folders with an unpacked wheel, such as of a new version

prints which pieces are on, and the digests of methods that are not known.
"""

import ast
import functools
import hashlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
# Each method with its digest in each of these versions, and the pieces that rely on it.
_TABLE = """
v1.core.block_pool
    BlockPool.__init__                                      2ffe6f04b175 ed7ceeef3f49 de502cee0c85 decode admit
v1.core.kv_cache_coordinator
    KVCacheCoordinator.__init__                             d2f6dbeed729 4b3b601933bd a12b800a8ab7 decode admit
    KVCacheCoordinator.get_num_blocks_to_allocate           80f5740c45cc b161b76430d9 b161b76430d9 admit
v1.core.kv_cache_manager
    KVCacheManager.allocate_slots                           6687cddac9ec 9129c3acf389 9129c3acf389 decode admit
    KVCacheManager.get_num_common_prefix_blocks             e8f74fbc0e16 486ed897b913 486ed897b913 decode admit
v1.core.single_type_kv_cache_manager
    SingleTypeKVCacheManager.allocate_new_blocks            44091000118b 44091000118b 44091000118b decode admit
    SingleTypeKVCacheManager.cache_blocks                   68723facca47 fd25b7d5b689 a393be385df4 decode
    SingleTypeKVCacheManager.get_num_blocks_to_allocate     d63d374cadd4 dab3fd20863e dab3fd20863e decode admit
v1.core.sched.async_scheduler
    AsyncScheduler._update_after_schedule                   6251a0cb16d4 96b49f7d69c0 96b49f7d69c0 decode admit
    AsyncScheduler._update_request_with_output              b9f97e5d6c35 490c42450bd2 absent       decode
v1.core.sched.output
    CachedRequestData                                       83b6ea752701 83b6ea752701 83b6ea752701 decode
    NewRequestData.from_request                             48eb08ff813d 35c2c175ff9a 35c2c175ff9a admit
v1.core.sched.request_queue
    FCFSRequestQueue                                        5e59f23530fe 5e59f23530fe 5e59f23530fe admit
v1.core.sched.scheduler
    Scheduler._make_cached_request_data                     0950ceddb4cf 0950ceddb4cf 0950ceddb4cf decode
    Scheduler._update_after_schedule                        633726ecf415 d2a39c57981f d2a39c57981f decode admit
    Scheduler._update_request_with_output                   953ada05f693 67716690b502 bb93433b89b2 decode
    Scheduler.add_request                                   17a73b0dc9ce fe940629816f fe940629816f hold
    Scheduler.finish_requests                               015e342b256d 910494e4932b 59388a4b21c0 hold
    Scheduler.schedule                                      b33e0bd7cfbe e65c2b07ffe6 e52db4c70e33 decode admit
    Scheduler.update_from_output                            b2b99460eb84 8f5b720a352c c5f8a4c0e55e decode hold
v1.core.sched.utils
    check_stop                                              df0904dc5a62 79db4919d510 79db4919d510 decode
v1.request
    Request.append_output_token_ids                         a0288961eb30 a0288961eb30 a0288961eb30 decode
    Request.update_block_hashes                             2c3e665032a3 2c3e665032a3 2c3e665032a3 decode
v1.structured_output
    StructuredOutputManager.accept_tokens                   absent       e3181d4fb31a e3181d4fb31a decode
v1.engine
    EngineCoreOutput                                        b3371b334858 d670ea4e3a70 c55518fc87e7 hold join
    EngineCoreOutputs                                       23a8c760706c f0b8b443382f f0b8b443382f hold
v1.engine.logprobs
    LogprobsProcessor._update_prompt_logprobs               a315d58457fc aa32645fb291 aa32645fb291 arrays
    LogprobsProcessor._update_sample_logprobs               d268b6fe9b17 d268b6fe9b17 d268b6fe9b17 arrays
    LogprobsProcessor.from_new_request                      edb404c0e470 edb404c0e470 edb404c0e470 arrays
    LogprobsProcessor.update_from_output                    a4afbf208783 bc52be627074 bc52be627074 arrays
v1.engine.output_processor
    OutputProcessor.process_outputs                         3f0dfadd8436 5dd2c70380eb 72132f4973c7 hold join
v1.outputs
    LogprobsLists                                           4e275008816b 4e275008816b 4e275008816b hold
    LogprobsTensors                                         f6026dcb6222 ca63fe63c529 ca63fe63c529 join rows_v1 rows_v2
config.vllm
    get_layers_from_vllm_config                             4f15b80ffc56 4f15b80ffc56 4f15b80ffc56 kernel whole
v1.attention.backend
    CommonAttentionMetadata                                 40426d317a62 f1aea07551ea f1aea07551ea whole
v1.attention.backends.flash_attn
    FA4DenseAttentionKernel.__call__                        absent       1d3420ef45f5 1d3420ef45f5 kernel
    FA4DenseAttentionKernel.kernel                          absent       470fbe58b81e 470fbe58b81e kernel
    FlashAttentionImpl.__init__                             3c195dab2724 b877d91494e5 b877d91494e5 kernel whole
    FlashAttentionImpl.forward                              afae05efdb0b 4ddaa8ccc260 4ddaa8ccc260 kernel
    FlashAttentionMetadata                                  b74fb6ec8ba1 6aebbd71cad5 6aebbd71cad5 whole
    FlashAttentionMetadataBuilder.__init__                  12edc3b20807 1ea9dd1b79bb 1ea9dd1b79bb whole
    FlashAttentionMetadataBuilder._get_scheduler_metadata   absent       01108706b59b 01108706b59b whole
    FlashAttentionMetadataBuilder._store_scheduler_metadata absent       968f4246e944 968f4246e944 whole
    FlashAttentionMetadataBuilder.build                     2633778cc21c d3bedb7b7ef5 d3bedb7b7ef5 whole
v1.cudagraph_dispatcher
    CudagraphDispatcher.dispatch                            af5f1cb2683c af5f1cb2683c af5f1cb2683c long
v1.worker.gpu.cudagraph_utils
    CudaGraphManager.dispatch                               02eeff199229 7fa1949b5b19 7fa1949b5b19 long
v1.worker.gpu.async_utils
    AsyncOutput                                             abe0780dcbea 9b699d143af1 703a9f785153 rows_v2
v1.worker.gpu.model_runner
    GPUModelRunner.sample                                   d0238ac7e91a b1dc07b53477 b1dc07b53477 mask_v2
v1.worker.gpu.sample.logprob
    compute_topk_scores                                     73bd41be47ab b77c3b022130 b77c3b022130 rows_v2
v1.worker.gpu.sample.prompt_logprob
    PromptLogprobsWorker.compute_prompt_logprobs            be2d605b4457 e65c625b28f0 e65c625b28f0 rows_v2
v1.worker.gpu.sample.sampler
    Sampler.__call__                                        597ff00e9a81 82731d159ea5 82731d159ea5 rows_v2 mask_v2
    Sampler.apply_sampling_params                           2fbb8c2f2acf 1fb804b36144 1fb804b36144 mask_v2
    Sampler.sample                                          79fcb66cdf1e 7b3f9843482a 21c3a5f3ab1d mask_v2
v1.worker.gpu.structured_outputs
    StructuredOutputsWorker.apply_grammar_bitmask           bc50e7bc1cd1 ad05012ce929 8afa545fc531 mask_v2
v1.worker.gpu_model_runner
    GPUModelRunner._get_prompt_logprobs_dict                5cd86d7dfe28 486674070b68 486674070b68 rows_v1
    GPUModelRunner.sample_tokens                            934ec9e0f7fa a21752160e18 a21752160e18 mask_v1
v1.sample.sampler
    Sampler.apply_logits_processors                         b159edf3402d b159edf3402d b159edf3402d mask_v1
    Sampler.compute_logprobs                                df96d6e6c371 df96d6e6c371 df96d6e6c371 rows_v1
    Sampler.forward                                         fb476d0a36f0 fb476d0a36f0 4b7bf108bb2c mask_v1
    Sampler.gather_logprobs                                 bd2ac7076bb8 53bdb450aacd 53bdb450aacd rows_v1
v1.structured_output.utils
    apply_grammar_bitmask                                   b345c12c13c0 b345c12c13c0 47b758f97670 mask_v1
"""
_ABSENT = "absent"
_IGNORED = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_params"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of this package that relies on methods of vLLM."""

    words: str
    """In a sentence: `... are off`."""
    cost: str
    """What an engine loses without it."""
    used_by: str
    """The names of an engine's parts, one of which has the piece: see `pieces_off`."""
    costs_much: bool = False
    """Whether users are told that it is off, in `status` and in the closing lines."""


_SLOW_STEPS = "steps take longer"
_VLLM_SCORES = "vLLM's own code takes them, which is slower or needs more memory"
PIECES = {
    "decode": Piece("the scheduler's short loops for decoding", _SLOW_STEPS, "scheduler", True),
    "admit": Piece("the scheduler's short loops for new prompts", _SLOW_STEPS, "scheduler pooling_scheduler", True),
    "hold": Piece("outputs in one piece", "each step sends outputs, which is slower", "scheduler", True),
    "join": Piece("joined results of prompts", "they are sent one by one", "scheduler pooling_scheduler"),
    "arrays": Piece("logprobs as arrays", "they come as Python objects, slowly", "front_end", True),
    "kernel": Piece("kernels for the attention of decoding", _SLOW_STEPS, "DecodingWorker", True),
    "long": Piece("steps without a graph for a very long request", "such steps take longer", "DecodingWorker"),
    "whole": Piece("whole graphs for steps of prompts", "they start layer by layer", "PromptWorker", True),
    "rows_v1": Piece("scores of prompts in pieces", _VLLM_SCORES, "RowsExtension_V1"),
    "rows_v2": Piece("kernels and rows for scores", _VLLM_SCORES, "RowsExtension_V2"),
    "mask_v1": Piece("raw scores of structured outputs", "rows that want them are refused", "RowsExtension_V1"),
    "mask_v2": Piece("raw scores of structured outputs", "rows that want them are refused", "RowsExtension_V2"),
}


@dataclass(frozen=True, slots=True)
class _Method:
    module: str
    name: str
    digests: tuple[str, ...]
    """By version."""
    pieces: tuple[str, ...]

    def __str__(self) -> str:
        return f"vllm.{self.module}.{self.name}"

    def digest(self, root: pathlib.Path) -> str:
        """In vLLM's folder `root`; `absent` if there is no such method."""
        return _digests(root, self.module).get(self.name, _ABSENT)


def _methods() -> Iterator[_Method]:
    module = ""
    num = len(_VERSIONS)
    for line in _TABLE.strip().splitlines():
        name, *words = line.split()
        if words:
            yield _Method(module, name, tuple(words[:num]), tuple(words[num:]))
        else:
            module = name


METHODS = tuple(_methods())


@functools.cache
def _digests(root: pathlib.Path, module: str) -> dict[str, str]:
    """Of all methods of a module that the table names."""
    base = root.joinpath(*module.split("."))
    path = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.exists()), None)
    if path is None:
        return {}
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
    wanted = {method.name for method in METHODS if method.module == module}
    return {name: _digest(found[name]) for name in wanted & found.keys()}


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:12]


def _plain(node: object) -> object:
    """The syntax tree as lists and text, the same in all versions of Python."""
    if isinstance(node, list):
        return [_plain(each) for each in node if not _is_text(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED]
    return [type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, []))]


def _is_text(node: object) -> bool:
    """Whether it is a docstring, or another text on a line of its own."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.cache
def _installed() -> pathlib.Path:
    spec = importlib.util.find_spec("vllm")
    [folder, *_] = spec.submodule_search_locations if spec and spec.submodule_search_locations else [""]
    return pathlib.Path(folder)


def _unknown(piece: str, root: pathlib.Path) -> list[_Method]:
    """The methods of a piece that are not as in the version that has most of them; the newest of such versions."""
    own = [(method, method.digest(root)) for method in METHODS if piece in method.pieces]
    places = reversed(range(len(_VERSIONS)))
    return min(([method for method, found in own if found != method.digests[at]] for at in places), key=len)


@functools.cache
def line_if_off(piece: str, root: pathlib.Path | None = None) -> str:
    """Why a piece is off, as one line; "" if it is on. root: vLLM's folder, by default that of the installed one."""
    root = root or _installed()
    unknown = _unknown(piece, root)
    if not unknown:
        return ""
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    return (
        f"vLLM {_version(root)}: {PIECES[piece].words} are off, since {unknown[0]}{more} is not one that they were "
        f"written for; {PIECES[piece].cost}"
    )


def _version(root: pathlib.Path) -> str:
    path = root / "_version.py"
    found = re.search(r"^__version__.*'(.+)'", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else "of an unknown version"


@functools.cache
def allowed(piece: str) -> bool:
    """Whether a piece may run with the installed vLLM. Prints once why not."""
    if line := line_if_off(piece):
        print(line, flush=True)
    return not line


def pieces_off(parts: Collection[str]) -> list[str]:
    """The pieces that an engine with these parts would have, but that are off."""
    return [
        name for name, piece in PIECES.items() if not {*parts}.isdisjoint(piece.used_by.split()) and line_if_off(name)
    ]


def main(folders: Sequence[str]) -> None:
    """Print a table: each piece with each vLLM. Below it, the methods that turn pieces off."""
    paths = [pathlib.Path(folder) for folder in folders]
    roots = [path / "vllm" if (path / "vllm").is_dir() else path for path in paths] or [_installed()]
    print(f"{'':10}", *(f"{_version(root):10}" for root in roots))
    for piece in PIECES:
        print(f"{piece:10}", *(f"{'off' if line_if_off(piece, root) else 'on':10}" for root in roots))
    for root in roots:
        for method in METHODS:
            if off := [piece for piece in method.pieces if method in _unknown(piece, root)]:
                print(f"vLLM {_version(root)}: {method} is {method.digest(root)}, for {', '.join(off)}")


if __name__ == "__main__":
    main(sys.argv[1:])
