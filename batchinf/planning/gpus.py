"""Data-centre and desktop GPUs: memory, bandwidth and arithmetic, with their sources. `plan` reads them by name."""

import dataclasses
import difflib
import re
from dataclasses import dataclass

from batchinf.base.errors import UserError

_T = 1e12
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a part of one. Rates are peaks, a second."""

    name: str
    title: str
    memory_bytes: int
    """What CUDA programs can have, as PyTorch gives it: `torch.cuda.get_device_properties(0).total_memory`."""
    bandwidth: float
    """Bytes of the memory."""
    bf16: float
    """FLOP of dense matrices in this type, with sums in 32 bits; 0 if the GPU does not have the type."""
    fp16: float
    fp8: float
    capability: tuple[int, int]
    link: float
    """Bytes in one direction to other GPUs of the host, by NVLink; 0: over PCIe."""
    source: str
    """Where the rates come from."""
    memory_source: str
    """Where PyTorch gave the memory, or the same number of CUDA's."""

    def flops(self, dtype: str) -> float:
        """Of matrices of this type. Without FP8 units, vLLM computes FP8 weights in 16 bits."""
        if dtype == "float32":
            return self.fp16 / 16  # vector units, about
        return {"fp8": self.fp8 or self.fp16, "float16": self.fp16}.get(dtype, self.bf16)


# Rates: NVIDIA's data sheets and architecture white papers, dense, with FP32 sums. MiB: as PyTorch gives it, which is
# what nvidia-smi shows less what the driver keeps. It differs by up to 1 % between drivers; these are of recent ones.
# name, title, MiB, GB/s of the memory, TFLOP/s in (bf16, fp16, fp8), compute capability, GB/s of NVLink, both sources
_GPUS = [
    ("b200", "B200 SXM", 182_631, 8000, (2250, 2250, 4500), (10, 0), 900,
     "nvidia.com/en-us/data-center/dgx-b200", "a log of PyTorch on a B200"),
    ("h200", "H200 SXM", 143_156, 4800, (989, 989, 1979), (9, 0), 450,
     "nvidia.com/en-us/data-center/h200", "a log of PyTorch 2.11 on an H200"),
    ("h100-80", "H100 SXM 80 GB", 81_079, 3350, (989, 989, 1979), (9, 0), 450,
     "nvidia.com/en-us/data-center/h100", "measured with PyTorch 2.11"),
    ("h100-94", "H100 NVL 94 GB", 95_320, 3900, (835, 835, 1671), (9, 0), 300,
     "nvidia.com/en-us/data-center/h100", "a log of PyTorch 2.13 on an H100 NVL"),
    ("h100-pcie", "H100 PCIe 80 GB", 81_008, 2000, (756, 756, 1513), (9, 0), 0,
     "nvidia.com/en-us/data-center/h100", "a log of PyTorch on an H100 PCIe"),
    ("a100-80", "A100 SXM 80 GB", 81_153, 2039, (312, 312, 0), (8, 0), 300,
     "nvidia.com/en-us/data-center/a100", "github.com/HiDream-ai/VAREdit/issues/6"),
    ("a100-40", "A100 SXM 40 GB", 40_448, 1555, (312, 312, 0), (8, 0), 300,
     "nvidia.com/en-us/data-center/a100", "github.com/TianheWu/CoSeR/issues/10"),
    ("l40s", "L40S", 45_466, 864, (362, 362, 733), (8, 9), 0,
     "nvidia.com/en-us/data-center/l40s", "github.com/QwenLM/Qwen3-VL/issues/2097 (an L40)"),
    ("l4", "L4", 22_563, 300, (121, 121, 242), (8, 9), 0,
     "nvidia.com/en-us/data-center/l4", "a log of PyTorch 2.11 on an L4"),
    ("a40", "A40", 45_416, 696, (150, 150, 0), (8, 6), 0,
     "nvidia.com/en-us/data-center/a40", "a log of PyTorch on an A40"),
    ("a10", "A10", 22_518, 600, (125, 125, 0), (8, 6), 0,
     "nvidia.com/en-us/data-center/products/a10-gpu", "github.com/zai-org/CogVLM/issues/236"),
    ("a6000", "RTX A6000", 48_671, 768, (155, 155, 0), (8, 6), 0,
     "nvidia.com/en-us/design-visualization/rtx-a6000", "a log of PyTorch 2.6 on an RTX A6000"),
    ("rtx-5090", "GeForce RTX 5090", 32_117, 1792, (210, 210, 419), (12, 0), 0,
     "Blackwell GB202 white paper", "github.com/aikitoria/open-gpu-kernel-modules/issues/1"),
    ("rtx-4090", "GeForce RTX 4090", 24_081, 1008, (165, 165, 330), (8, 9), 0,
     "Ada GPU architecture white paper", "a log of PyTorch 2.5 on an RTX 4090"),
    ("rtx-3090", "GeForce RTX 3090", 24_124, 936, (71, 71, 0), (8, 6), 0,
     "Ampere GA102 white paper", "a log of PyTorch 2.13 on an RTX 3090"),
    ("v100-32", "V100 SXM2 32 GB", 32_502, 900, (0, 125, 0), (7, 0), 150,
     "nvidia.com/en-us/data-center/v100", "github.com/liucongg/ChatGLM-Finetuning/issues/73"),
    ("v100-16", "V100 SXM2 16 GB", 16_159, 900, (0, 125, 0), (7, 0), 150,
     "nvidia.com/en-us/data-center/v100", "github.com/kchengiva/Shift-GCN/issues/34"),
    ("t4", "T4", 14_909, 320, (0, 65, 0), (7, 5), 0,
     "nvidia.com/en-us/data-center/tesla-t4", "github.com/Zheng-Chong/CatVTON/issues/133"),
    ("rtx-2080-ti", "GeForce RTX 2080 Ti", 11_018, 616, (0, 54, 0), (7, 5), 0,
     "Turing architecture white paper", "github.com/JDAI-CV/image-captioning/issues/11"),
]  # fmt: skip
GPUS = {
    name: Gpu(
        name=name,
        title=title,
        memory_bytes=mib << 20,
        bandwidth=bandwidth * _GB,
        bf16=bf16 * _T,
        fp16=fp16 * _T,
        fp8=fp8 * _T,
        capability=capability,
        link=link * _GB,
        source=source,
        memory_source=memory_source,
    )
    for name, title, mib, bandwidth, (bf16, fp16, fp8), capability, link, source, memory_source in _GPUS
}

# Short names, and MIG parts that have names of their own.
_ALIASES = {"h100": "h100-80", "h100-sxm": "h100-80", "h100-nvl": "h100-94", "h100-40": "h100-80:3g",
            "a100": "a100-80", "h200-sxm": "h200", "v100": "v100-32", "4090": "rtx-4090", "3090": "rtx-3090",
            "5090": "rtx-5090", "2080-ti": "rtx-2080-ti", "rtx-a6000": "a6000"}  # fmt: skip
# MIG profiles: sevenths of the arithmetic, eighths of the memory (NVIDIA MIG user guide, "Supported MIG profiles").
_PARTS = {"1g": (1, 1), "2g": (2, 2), "3g": (3, 4), "4g": (4, 4), "7g": (7, 8)}
_WITH_PARTS = ("a100-40", "a100-80", "h100-80", "h100-94", "h100-pcie", "h200", "b200")


def gpu_named(text: str) -> Gpu:
    """A GPU by its name, such as `h100-80` or, for a MIG part, `h100-80:3g`. Raises UserError with near names."""
    plain = re.sub(r"[\s_]+", "-", text.strip().lower()).removeprefix("nvidia-").removeprefix("geforce-")
    name, _, part = _ALIASES.get(plain, plain).partition(":")
    gpu = GPUS.get(_ALIASES.get(name, name))
    if gpu is None:
        near = difflib.get_close_matches(name, [*GPUS, *_ALIASES], 3, 0.5)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UserError(f"--gpu: got '{text}', which is not known{hint}; known: {', '.join(GPUS)}")
    if not part:
        return gpu
    part = part.partition(".")[0]
    if part not in _PARTS or gpu.name not in _WITH_PARTS:
        raise UserError(f"--gpu: got '{text}'; MIG parts are {', '.join(_PARTS)}, of {', '.join(_WITH_PARTS)}")
    return _part_of(gpu, part)


def _part_of(gpu: Gpu, part: str) -> Gpu:
    arithmetic, memory = _PARTS[part]
    share = arithmetic / 7
    return dataclasses.replace(
        gpu,
        name=f"{gpu.name}:{part}",
        title=f"{gpu.title}, MIG {part}",
        memory_bytes=gpu.memory_bytes * memory // 8,
        bandwidth=gpu.bandwidth * memory / 8,
        bf16=gpu.bf16 * share,
        fp16=gpu.fp16 * share,
        fp8=gpu.fp8 * share,
        link=0,
    )


def gpu_like(title: str, memory_bytes: int | None) -> Gpu | None:
    """The GPU of the table for a device, by NVML's name and its memory; None if it is not there, or on a processor."""
    words = title.lower().replace("nvidia", "").replace("geforce", "")
    near = [gpu for gpu in GPUS.values() if re.search(rf"\b{_family(gpu.name)}\b", words)]
    if not near or memory_bytes is None:
        return None
    # Drivers leave different sizes of the same GPU, so the memory alone does not tell PCIe from SXM.
    nearest = min(
        near, key=lambda gpu: (("pcie" in gpu.name) != ("pcie" in words), abs(gpu.memory_bytes - memory_bytes))
    )
    return dataclasses.replace(nearest, memory_bytes=memory_bytes)


def _family(name: str) -> str:
    """`h100` of `h100-80`, `4090` of `rtx-4090`, `2080 ti` of `rtx-2080-ti`."""
    return name.removeprefix("rtx-").replace("-ti", " ti").partition("-")[0]


def why_not(gpu: Gpu, dtype: str) -> str | None:
    """Why vLLM's CUDA 13 build does not run on the GPU, or not in this type; None if it does.

    CUDA 13 needs compute capability 7.5 (CUDA 13.0 release notes), bfloat16 8.0 and FP8 arithmetic 8.9; before these,
    vLLM computes FP8 weights in 16 bits.
    """
    capability = ".".join(map(str, gpu.capability))
    if gpu.capability < (7, 5):
        return f"compute capability {capability}: a CUDA 13 build needs 7.5"
    if dtype == "bfloat16" and gpu.capability < (8, 0):
        return "no bfloat16; set model.dtype float16"
    return None
