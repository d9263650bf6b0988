"""Every Triton kernel compiles for Hopper and for RTX 50, without a GPU, within the shared memory of both."""

import itertools

import pytest

from vae.ops.gpu_blocks import NUM_WARPS, SHARED_MEMORY_BYTES, merge_tile, norm_blocks, row_tile

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
    options = {"num_warps": num_warps, "num_stages": 1}
    return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)


def norm_launches():
    """(kernel, types, constants, warps) of the norm in bf16 at 128 channels, in both layouts."""
    from vae.ops import norm_kernels as kernels

    fp32, bf16 = "*fp32", "*bf16"
    common = {"h": bf16, "mean": fp32, "rstd": fp32, "weight": fp32, "bias": fp32}
    common |= {
        "pixels": "i32",
        "channels": "i32",
        "groups": "i32",
        "stride_b": "i64",
        "tiles_per_program": "i32",
    }
    common |= {"means": fp32, "squares": fp32, "grad_unit_sums": fp32, "grad_sums": fp32, "group_means": fp32}
    common |= {"out": bf16, "grad_out": bf16, "grad_h": bf16}
    whole = (
        kernels.partial_moments_kernel,
        kernels.normalize_kernel,
        kernels.partial_sums_kernel,
        kernels.input_gradient_kernel,
    )
    for kernel, channels_last in itertools.product(whole, (True, False)):
        blocks = norm_blocks(1, 128, 1024**2, channels_last)
        other, one = ("stride_p", "stride_c") if channels_last else ("stride_c", "stride_p")
        types = {name: kind for name, kind in (common | {other: "i32"}).items() if name in kernel.arg_names}
        constants = {"ROWS": blocks.rows, "COLUMNS": blocks.columns, one: 1}
        yield kernel, types, constants | ({"SILU": True} if "SILU" in kernel.arg_names else {}), NUM_WARPS
    merged = {"mean_out": fp32, "rstd_out": fp32, "channel_sums": fp32, "programs": "i32", "eps": "fp32"}
    merged |= common | {"rows_per_program": "i32"}
    for kernel, group_channels in itertools.product(
        (kernels.merge_moments_kernel, kernels.merge_sums_kernel), (4, 24)
    ):
        parts, columns = merge_tile(group_channels)
        types = {name: kind for name, kind in merged.items() if name in kernel.arg_names}
        yield kernel, types, {"group_channels": group_channels, "PARTS": parts, "COLUMNS": columns}, NUM_WARPS


def attention_launches():
    """(kernel, types, constants, warps) of attention in bf16, for whole blocks and short rows."""
    from vae.ops import attention_triton as kernels

    fp32, bf16 = "*fp32", "*bf16"
    types = {"scores": fp32, "grad_weights": fp32, "weights": bf16, "grad_scores": bf16, "scale": "fp32"}
    types |= {name: fp32 for name in ("row_max", "row_sum", "rescale", "log_sums", "deltas", "out")}
    types |= {"a": bf16, "b": bf16, "rows": "i32", "columns": "i32"}
    whole = (kernels.softmax_kernel, kernels.gradient_kernel, kernels.row_products_kernel)
    for kernel, width in itertools.product(whole, (64, 512, 2048)):
        tile = row_tile(width)
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        yield kernel, own, {"ROWS": tile.rows, "COLUMNS": tile.columns}, tile.num_warps


def feature_distance_launches():
    """(kernel, types, constants, warps) of LPIPS distances in bf16, channels last."""
    from vae.losses import feature_distance_triton as kernels

    fp32, bf16 = "*fp32", "*bf16"
    types = {"features": bf16, "target": bf16, "grad_features": bf16, "linear": fp32, "sums": fp32}
    types |= {"grad": fp32, "scale": "fp32", "eps": "fp32", "positions": "i32", "channels": "i32"}
    types |= {"stride_b": "i64", "stride_p": "i32"}
    for kernel, width in itertools.product((kernels.distance_kernel, kernels.gradient_kernel), (64, 512)):
        tile = row_tile(width)
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        yield kernel, own, {"ROWS": tile.rows, "COLUMNS": tile.columns, "stride_c": 1}, tile.num_warps


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("launches", [norm_launches, attention_launches, feature_distance_launches])
def test_kernels_compile_within_shared_memory(launches, capability, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, types, constants, num_warps in launches():
        aligned = [name for name, kind in types.items() if kind.startswith("*") or name.startswith("stride")]
        aligned += ["channels", "pixels", "columns"]
        compiled = compile_kernel(kernel, types, constants, aligned, num_warps, capability)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
        if {"h", "scores", "features"} & set(types):  # large tensors are read 16 bytes at a time
            assert "ld.global.v4.b32" in compiled.asm["ptx"], f"{kernel.__name__} {constants}"
