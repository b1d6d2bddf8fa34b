"""Takes the place of Triton, which runs on GPUs alone: a kernel's own code runs in PyTorch, one program at a time."""

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch


class Pointer:
    """The memory of a tensor, from an element on."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        # A kernel is given strides and reads the memory behind a view.
        self.memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        self.offset = tensor.storage_offset() + offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, places: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + places)


def load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> torch.Tensor:
    if mask is None:
        return pointer.memory[pointer.offset]
    return torch.where(mask, pointer.memory[torch.where(mask, pointer.offset, 0)], other)


def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    value = value.to(pointer.memory.dtype)
    if mask is None:
        pointer.memory[pointer.offset] = value
    else:
        mask = mask.expand(pointer.offset.shape)
        pointer.memory[pointer.offset[mask]] = value[mask]


def dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Triton refuses two types.
    assert one.dtype == other.dtype
    return one.float() @ other.float()


def minimum(one: torch.Tensor, other: torch.Tensor | int) -> torch.Tensor:
    return torch.minimum(one, torch.as_tensor(other, dtype=one.dtype))


_program = [0, 0]

language = types.SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float16=torch.float16, float32=torch.float32, load=load, store=store,
    program_id=lambda axis: torch.tensor(_program[axis]),
    arange=torch.arange, where=torch.where, exp=torch.exp, exp2=torch.exp2, log=torch.log, abs=torch.abs,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    sum=lambda values, axis: values.sum(axis), max=lambda values, axis: values.amax(axis),
    min=lambda values, axis: values.amin(axis), reshape=torch.reshape, maximum=torch.maximum, minimum=minimum,
    dot=dot, trans=lambda matrix: matrix.T,
    range=lambda start, end, step, num_stages: range(start, int(end), step),
)  # fmt: skip


def _as_pointer(item: Any) -> Any:
    return Pointer(item) if isinstance(item, torch.Tensor) else item


class Launcher:
    """Replaces a kernel: `Launcher(kernel)[grid](*arguments)` runs all its programs."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **named: Any) -> None:
            given = list(map(_as_pointer, arguments))
            more = {name: _as_pointer(item) for name, item in named.items()}
            for places in itertools.product(*map(range, grid)):
                _program[: len(places)] = places
                self.kernel(*given, **more)

        return launch
