"""Every Triton kernel compiles for Hopper and for RTX 50, without a GPU, within the shared memory of both."""

import itertools
import re
import subprocess
import tempfile

import pytest

from tests.harness.operations import SHARED_MEMORY_BYTES
from vae.ops.library import (
    MAX_REGISTERS,
    MAX_RMS_CHANNELS,
    NUM_WARPS,
    norm_blocks,
    reduction_programs,
    rms_blocks,
    row_tile,
)

CAPABILITIES = (90, 120)  # H100 and H200; RTX 50


def compile_kernel(kernel, types: dict, constants: dict, aligned: list, num_warps: int, capability: int):
    """Compile a kernel as it is launched; `aligned` pointers and numbers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in types},
    )
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}
    if num_warps == NUM_WARPS and {"h", "x"} & set(types):
        options["maxnreg"] = MAX_REGISTERS
    return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(compiled) -> int:
    """Bytes of local memory of one thread: registers are spilled to it."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", listing)))


def loops(ptx: str) -> list[str]:
    """The code of each loop without another one in it: from a label to the branch back to it."""
    labels = {match[1]: match.start() for match in re.finditer(r"(\$L__BB\w+):", ptx)}
    branches = [(match[1], match.start()) for match in re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\w+);", ptx)]
    spans = [(labels[label], end) for label, end in branches if labels[label] < end]
    return [ptx[start:end] for start, end in spans if not any(start <= a and b < end for a, b in spans)]


def norm_launches(capability):
    """(kernel, types, constants, warps) of the norm: 128 channels in bf16 and fp32, and 384."""
    from vae.ops import norm_triton as kernels

    fp32 = ("moments", "statistics", "weight", "bias", "sums", "grad_weight", "grad_bias", "h_bias")
    numbers = ("pixels", "channels", "groups", "tiles_per_program")
    common = dict.fromkeys(fp32, "*fp32") | dict.fromkeys(numbers, "i32") | {"eps": "fp32"}
    none = {"h_bias": None}
    whole = [(kernels.moments_kernel, {}), (kernels.sums_kernel, {"SILU": True}), (kernels.add_kernel, {})]
    whole += [(kernels.normalize_kernel, {"SILU": True} | given) for given in ({}, none | {"moments": None})]
    of_norms = (none, {"skip": None}, none | {"skip": None})  # two in a residual block, and others
    whole += [(kernels.input_gradient_kernel, {"SILU": True} | given) for given in of_norms]
    cases = [("*bf16", 128), ("*fp32", 128), ("*bf16", 384)][: 3 if capability == 120 else 1]
    for (kernel, switches), (element, channels) in itertools.product(whole, cases):
        blocks = norm_blocks(1, channels, 1024**2, 32, reduction_programs())
        known = common | dict.fromkeys(("h", "x", "out", "grad_out", "skip", "grad_h"), element)
        types = {name: known[name] for name in kernel.arg_names if name in known and name not in switches}
        constants = {"BLOCK": blocks.channels, "ROWS": blocks.rows, "COLUMNS": blocks.columns}
        constants |= {"GROUPS": blocks.groups}
        yield kernel, types, constants | switches, NUM_WARPS


def attention_launches(_capability):
    """(kernel, types, constants, warps) of attention in bf16, for long and short rows."""
    from vae.ops import attention_triton as kernels

    fp32, bf16 = "*fp32", "*bf16"
    types = {"scores": fp32, "grad_weights": fp32, "weights": bf16, "grad_scores": bf16, "scale": "fp32"}
    types |= {name: fp32 for name in ("log_sums", "sums", "deltas", "out")}
    types |= {"a": bf16, "b": bf16} | dict.fromkeys(("rows", "columns", "stride"), "i32")
    whole = (kernels.softmax_kernel, kernels.gradient_kernel, kernels.row_products_kernel)
    for kernel, width in itertools.product(whole, (64, 512, 2048)):
        tile = row_tile(width)
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        yield kernel, own, {"ROWS": tile.rows, "COLUMNS": tile.columns}, tile.num_warps


def feature_distance_launches(_capability):
    """(kernel, types, constants, warps) of LPIPS distances in bf16."""
    from vae.losses import feature_distance_triton as kernels

    fp32, bf16 = "*fp32", "*bf16"
    types = {"features": bf16, "target": bf16, "grad_features": bf16, "linear": fp32, "sums": fp32}
    types |= {"grad": fp32, "scale": "fp32", "eps": "fp32", "positions": "i32", "channels": "i32"}
    for kernel, width in itertools.product((kernels.distance_kernel, kernels.gradient_kernel), (64, 512)):
        tile = row_tile(width)
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        yield kernel, own, {"ROWS": tile.rows, "COLUMNS": tile.columns}, tile.num_warps


def rms_norm_launches(capability):
    """(kernel, types, constants, warps) of the RMS norm: Wan's widths, and the widest."""
    from vae.ops import rms_norm_triton as kernels

    fp32, whole = "*fp32", (kernels.forward_kernel, kernels.backward_kernel)
    common = dict.fromkeys(("h_bias", "weight", "sums"), fp32) | dict.fromkeys(("root", "least"), "fp32")
    common |= dict.fromkeys(("pixels", "channels", "tiles_per_program"), "i32")
    cases = [("*bf16", 96), (fp32, 4096), (fp32, 96), ("*bf16", 384), (fp32, 384)]
    cases = cases[: 5 if capability == 120 else 2]
    for kernel, (element, channels), absent in itertools.product(whole, cases, ("h_bias", "skip")):
        without = {absent: None} if absent in kernel.arg_names else {}
        known = common | dict.fromkeys(("h", "out", "grad_out", "skip", "grad_h"), element)
        types = {name: known[name] for name in kernel.arg_names if name in known and name not in without}
        blocks = rms_blocks(channels, 1024**2, reduction_programs())
        constants = {"ROWS": blocks.rows, "COLUMNS": blocks.columns, "SILU": True}
        yield kernel, types, constants | without, NUM_WARPS


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "launches", [norm_launches, attention_launches, feature_distance_launches, rms_norm_launches]
)
def test_kernels_compile_within_shared_memory(launches, capability, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_old = [int(number) for number in triton.__version__.split(".")[:2]] < [3, 8]
    for kernel, types, constants, num_warps in launches(capability):
        aligned = [name for name, kind in types.items() if kind.startswith("*")]
        aligned += ["channels", "pixels", "stride"]
        compiled = compile_kernel(kernel, types, constants, aligned, num_warps, capability)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
        name = f"{kernel.__name__} {constants}"
        # a few values that wait for the end of the loop, up to ten with Triton 3.6 and 3.7 in the widest
        # norm; a spill in the loop would be of tiles, 64 bytes each
        is_widest = "root" in types and constants["COLUMNS"] == MAX_RMS_CHANNELS
        assert stack_bytes(compiled) <= (40 if is_old and is_widest else 24), f"{name} spills registers"
        if "root" in types:  # rows are reduced within the loop, by barriers if they are wider than a warp
            assert re.search(r"cp\.async\.cg.*, 0x10|ld\.global\.v4\.b32", compiled.asm["ptx"]), name
        elif {"h", "scores"} & set(types):  # tiles are read early, 16 bytes at a time, and nothing is reduced
            found = [part for part in loops(compiled.asm["ptx"]) if re.search(r"cp\.async\.cg.*, 0x10", part)]
            assert found, name
            assert {loop.count("bar.sync") for loop in found} == {2}, (
                f"{name}: the pipeline's own barriers only"
            )
        elif "features" in types:  # large tensors are read 16 bytes at a time
            assert "ld.global.v4.b32" in compiled.asm["ptx"], name
