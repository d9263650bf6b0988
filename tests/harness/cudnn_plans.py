"""What cuDNN would choose on a card that is not here: it takes the description of a device instead of one.

The numbers are those of cuDNN's header cudnn_graph.h: kinds of descriptors, their attributes, and types of
attributes.
"""

import ctypes
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RTX_5090 = {
    "deviceName": "NVIDIA GeForce RTX 5090",
    "deviceVer": 1200,
    "multiProcessorCount": 170,
    "maxSharedMemoryPerBlockOptin": 101_376,
    "maxCtasPerSM": 24,
    "maxThreadsPerSM": 1536,
    "smClockRateKHz": 2_407_000,
    "memClockRateKHz": 14_001_000,
    "l2CacheSize": 100_663_296,
    "totalGlobalMem": 33_683_800_064,
    "maxGridSize": [2**31 - 1, 65_535, 65_535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65_536,
    "smCountOrigin": 0,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49_152,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65_536,
    "maxThreadsPerBlock": 1024,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "cudaDeviceId": 0,
    "driverVer": 13_020,
}
BF16, FP32 = 9, 0
CROSS_CORRELATION = 1
INT64, FLOAT, TYPE, MODE, HEURISTICS, POINTER, CHAR = 3, 4, 1, 7, 8, 15, 24
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (10, 700), (12, 706), (11, 712)  # kinds, and their first attribute


class Convolution(NamedTuple):
    """A convolution, or one of its gradients, of square kernels in bf16 and channels_last layout."""

    kind: tuple[int, int]
    input: tuple[int, ...]  # (B, C, H, W)
    weight: tuple[int, ...]  # (C', C, k, k)
    output: tuple[int, ...]
    stride: int
    padding: int


class Convolutions(TorchDispatchMode):
    """While active, collects PyTorch's convolutions as cuDNN gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Convolution] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == torch.ops.aten.convolution.default:
            h, weight, _, stride, padding, _, transposed, *_ = args
            self._add(h, weight, result, stride, padding, transposed, (True, False, False))
        if func == torch.ops.aten.convolution_backward.default:
            grad_out, h, weight, _, stride, padding, _, transposed, _, _, wanted = args
            self._add(h, weight, grad_out, stride, padding, transposed, (False, *wanted[:2]))
        return result

    def _add(
        self, h: Any, weight: Any, out: Any, stride: Any, padding: Any, transposed: bool, wanted: Any
    ) -> None:
        kinds = [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT]
        if transposed:  # the input gradient of the convolution that goes the other way
            h, out, kinds = out, h, [INPUT_GRADIENT, FORWARD, WEIGHT_GRADIENT]
        shapes = tuple(h.shape), tuple(weight.shape), tuple(out.shape)
        rest = stride[0], padding[0]
        self.found |= {
            Convolution(kind, *shapes, *rest) for kind, want in zip(kinds, wanted, strict=True) if want
        }


def cudnn_library() -> Path | None:
    """The folder of the installed cuDNN, or None."""
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    folders = [Path(folder) / "lib" for folder in spec.submodule_search_locations or ()] if spec else []
    return next((folder for folder in folders if (folder / "libcudnn.so.9").exists()), None)


class Cudnn:
    """cuDNN's heuristics for a described card."""

    def __init__(self, card: dict[str, Any]) -> None:
        folder = cudnn_library()
        ctypes.CDLL(str(folder / "libcudnn_graph.so.9"), mode=ctypes.RTLD_GLOBAL)
        self._cudnn = ctypes.CDLL(str(folder / "libcudnn.so.9"))
        self._card = self._create(38)
        text = json.dumps(card).encode()
        arguments = self._card, 2702, CHAR, ctypes.c_int64(len(text)), ctypes.c_char_p(text)
        self._check(self._cudnn.cudnnBackendSetAttribute(*arguments))
        self._finalize(self._card)

    def workspace_bytes(self, convolution: Convolution) -> int:
        """The workspace of cuDNN's first choice."""
        search = self._descriptor(
            4,
            (201, POINTER, [self._graph(convolution)]),
            (200, HEURISTICS, [0]),
            (204, POINTER, [self._card]),
        )
        config, one = self._create(3), ctypes.c_int64()
        first = (ctypes.c_void_p * 1)(config.value)
        self._check(
            self._cudnn.cudnnBackendGetAttribute(
                search, 202, POINTER, ctypes.c_int64(1), ctypes.byref(one), first
            )
        )
        plan = self._descriptor(5, (401, POINTER, [config]), (407, POINTER, [self._card]))
        size = ctypes.c_int64()
        arguments = plan, 402, INT64, ctypes.c_int64(1), ctypes.byref(one), ctypes.byref(size)
        self._check(self._cudnn.cudnnBackendGetAttribute(*arguments))
        return size.value

    def _graph(self, convolution: Convolution) -> ctypes.c_void_p:
        kind, base = convolution.kind
        shapes = convolution.weight, convolution.input, convolution.output
        weight, h, out = (self._tensor(uid, shape) for uid, shape in enumerate(shapes))
        sizes = {
            103: [convolution.stride] * 2,
            105: [convolution.padding] * 2,
            104: [convolution.padding] * 2,
        }
        rest = [(name, INT64, values) for name, values in {**sizes, 102: [1, 1], 106: [2]}.items()]
        rule = self._descriptor(1, (100, TYPE, [FP32]), (101, MODE, [CROSS_CORRELATION]), *rest)
        tensors = [(base + offset, POINTER, [t]) for offset, t in enumerate((rule, weight, h, out), 2)]
        node = self._descriptor(kind, (base, FLOAT, [1.0]), (base + 1, FLOAT, [0.0]), *tensors)
        return self._descriptor(15, (801, POINTER, [node]))

    def _tensor(self, uid: int, shape: Sequence[int]) -> ctypes.c_void_p:
        _, channels, height, width = shape
        strides = [height * width * channels, 1, width * channels, channels]
        layout = (902, INT64, [*shape]), (903, INT64, strides), (900, INT64, [32])
        return self._descriptor(17, (906, INT64, [uid]), (901, TYPE, [BF16]), *layout)

    def _descriptor(self, kind: int, *attributes: tuple[int, int, list[Any]]) -> ctypes.c_void_p:
        handle = self._create(kind)
        for name, type_, values in attributes:
            element = {INT64: ctypes.c_int64, FLOAT: ctypes.c_float, POINTER: ctypes.c_void_p}.get(
                type_, ctypes.c_int
            )
            plain = [value.value if isinstance(value, ctypes.c_void_p) else value for value in values]
            array = (element * len(plain))(*plain)
            count = ctypes.c_int64(len(plain))
            self._check(self._cudnn.cudnnBackendSetAttribute(handle, name, type_, count, array))
        return self._finalize(handle)

    def _create(self, kind: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._check(self._cudnn.cudnnBackendCreateDescriptor(kind, ctypes.byref(handle)))
        return handle

    def _finalize(self, handle: ctypes.c_void_p) -> ctypes.c_void_p:
        self._check(self._cudnn.cudnnBackendFinalize(handle))
        return handle

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(4000)
            self._cudnn.cudnnGetLastErrorString(text, 4000)
            raise RuntimeError(f"{status}: {text.value.decode(errors='replace')}")
