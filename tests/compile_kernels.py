"""Compiles the Triton kernels of a folder for an NVIDIA GPU, which need not be there. `test_vllm_compile.py` runs it.

    PYTHONPATH=folder-with-triton python tests/compile_kernels.py batchinf/engines/vllm/kernels

It needs neither vLLM nor PyTorch: it takes the kernels and the numbers at the top of a module from its source.
"""

import ast
import importlib.util
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
IMPORTS = "import triton\nimport triton.language as tl\n\n\n"
# Strides and addresses are multiples of 16, which lets Triton load several numbers at once.
ALIGNED = [["tt.divisibility", 16]]
OF_MODEL = ("bf16", "fp16")


def kernels_of(source: str) -> tuple[list[str], str, dict[str, Any]]:
    """The names and the text of a module's kernels, and the numbers at its top."""
    kernels, numbers = [], {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
            kernels.append(node)
        if isinstance(node, ast.Assign):
            names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            numbers |= {
                ast.unparse(name): each for name, each in zip(names, value if len(names) > 1 else [value], strict=True)
            }
    return [kernel.name for kernel in kernels], IMPORTS + "\n\n".join(map(ast.unparse, kernels)), numbers


def decode_kernel(numbers: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any], int]]:
    """The ways in which the kernel is launched: types of its arguments, constants, and warps.

    Each size of groups and blocks comes with one of the two types of as many bytes: the other has one size.
    """
    tile, warps, stages = numbers["_SHAPE"]
    sizes = [*((group, 16) for group in (1, 4, 7, 8, 16)), (4, 32), (4, 128)]
    kinds = [*((kind, kind) for kind in OF_MODEL), *((kind, "fp8e4nv") for kind in OF_MODEL)]
    for (out, kind), head_size, (group, block_size) in itertools.product(kinds, numbers["_HEAD_SIZES"], sizes):
        if out != OF_MODEL[0] and (group, block_size) != (4, 16):
            continue
        types = {"out": f"*{out}", "scale": "fp32", "block_table": "*i32", "lengths": "*i32"}
        types |= dict.fromkeys(("query", "keys", "values"), f"*{kind}")
        constants = {
            "BLOCK_SIZE": block_size, "GROUP": group, "HEAD_SIZE": head_size, "ROWS": numbers["_ROWS"], "TILE": tile,
            "STAGES": stages, "IS_FP8": kind == "fp8e4nv",
        }  # fmt: skip
        scales = ("query_scale", "key_scale", "value_scale")
        yield types | dict.fromkeys(scales, "*fp32"), constants, warps
        if kind != "fp8e4nv" and (group, block_size) == (4, 16):  # without float8 there may be no scales
            yield types, constants | dict.fromkeys(scales), warps


def score_kernel(numbers: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any], int]]:
    """See `decode_kernel`. For one logprob, and with the likeliest token."""
    for types, constants, warps in _of_logits(numbers):
        for width in (1, 2):
            yield types | {"found_ids": "*i64", "logprobs": "*fp32"}, constants | {"WIDTH": width}, warps


def maxima_kernel(numbers: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any], int]]:
    """See `decode_kernel`. For two and more logprobs."""
    for types, constants, warps in _of_logits(numbers):
        kind = types["logits"]
        yield types | {"log_sums": "*fp32", "maxima": kind}, constants | {"SEGMENT": numbers["_SEGMENT"]}, warps


def _of_logits(numbers: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any], int]]:
    block, warps = numbers["_TILE"]
    for kind, ids in itertools.product((*OF_MODEL, "fp32"), ("i64", "i32")):
        constants = {"BLOCK": block, "GROUP": numbers["_GROUP"], "LOG2_E": numbers["_LOG2_E"]}
        yield {"logits": f"*{kind}", "token_ids": f"*{ids}", "ranks": "*i64"}, constants, warps


LAUNCHES = {"decode_kernel": decode_kernel, "score_kernel": score_kernel, "maxima_kernel": maxima_kernel}
# Called by other kernels.
INNER = {"one_pass"}


def compile_one(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> int:
    """Bytes of the program for the GPU. Arguments without a type are whole numbers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    unaligned = {"num_segments", "vocab_size", "scale"}
    attributes = {
        (place,): ALIGNED for place, name in enumerate(names) if name not in constants and name not in unaligned
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return len(compiled.asm["cubin"])


def main(folder: pathlib.Path) -> None:
    """Prints a line for each program."""
    missing = set(LAUNCHES)
    for file in sorted(folder.glob("*.py")):
        names, text, numbers = kernels_of(file.read_text())
        missing -= set(names)
        if unknown := set(names) - INNER - LAUNCHES.keys():
            sys.exit(f"{file} has kernels that are not compiled here: {unknown}. Say how they are launched.")
        for name in names:
            for given in LAUNCHES[name](numbers) if name in LAUNCHES else ():
                print(name, given, compile_one(getattr(loaded(text), name), *given), "bytes", flush=True)
    if missing:
        sys.exit(f"{folder} has no {missing}")


def loaded(text: str) -> ModuleType:
    """A module of this text, in a file, where Triton reads it again."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location("kernels", file.name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
