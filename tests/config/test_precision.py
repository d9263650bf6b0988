"""The dtype for --mixed_precision and --use_bf16 on every kind of device."""

import pytest

from vae.config.options import SpeedConfig
from vae.config.precision import PrecisionSupport, choose_dtype, dtype_without_fp16, precision_remark
from vae.config.recipes import recipe_values
from vae.config.resolve import resolve
from vae.system.errors import UserError

RTX_5090 = PrecisionSupport("RTX 5090", is_gpu=True, bf16="native")
T4 = PrecisionSupport("Tesla T4", is_gpu=True, bf16="none")
AVX512_BF16 = PrecisionSupport("the CPU", is_gpu=False, bf16="native")
AVX2 = PrecisionSupport("the CPU", is_gpu=False, bf16="slow")


@pytest.mark.parametrize(
    ("mixed", "bf16", "expected"),
    [
        (False, None, ["float32", "float32", "float32", "float32"]),
        (True, None, ["float16", "float16", "bfloat16", "float32"]),
        (True, False, ["float16", "float16", "float32", "float32"]),
        (False, False, ["float32", "float32", "float32", "float32"]),
    ],
)
def test_dtype_is_what_the_device_computes_well(mixed, bf16, expected):
    speed = SpeedConfig(mixed_precision=mixed, use_bf16=bf16)
    assert [choose_dtype(speed, device) for device in (RTX_5090, T4, AVX512_BF16, AVX2)] == expected


@pytest.mark.parametrize("mixed", [False, True])
def test_explicit_bf16_is_obeyed_or_refused(mixed):
    speed = SpeedConfig(mixed_precision=mixed, use_bf16=True)
    assert [choose_dtype(speed, device) for device in (RTX_5090, AVX512_BF16, AVX2)] == ["bfloat16"] * 3
    with pytest.raises(UserError, match=r"--use_bf16: Tesla T4 .*use --mixed_precision"):
        choose_dtype(speed, T4)


def test_remark_only_on_a_cpu_without_bf16_instructions():
    mixed, explicit = SpeedConfig(mixed_precision=True), SpeedConfig(use_bf16=True)
    for device in (RTX_5090, T4, AVX512_BF16):
        assert precision_remark(mixed, device) is None
        assert precision_remark(explicit, device) is None
    assert precision_remark(SpeedConfig(), AVX2) is None
    assert "--mixed_precision" in precision_remark(mixed, AVX2)
    assert "fp32" in precision_remark(mixed, AVX2)
    assert precision_remark(explicit, AVX2).startswith("WARNING: --use_bf16")


@pytest.mark.parametrize("profile", ["demo", "fast"])
@pytest.mark.parametrize("no", ["use_bf16", "mixed_precision"])
def test_explicit_no_wins_over_the_profile_and_the_checkpoint(profile, no):
    values = recipe_values(profile, has_gpu=False)
    assert choose_dtype(resolve({}, None, values).speed, RTX_5090) == "float16"
    saved = {"use_bf16": True, "mixed_precision": True}
    for inherited in (values, {**values, **saved}):
        speed = resolve({no: False}, None, inherited).speed
        assert choose_dtype(speed, RTX_5090) == "float32"


@pytest.mark.parametrize(("bf16", "expected"), [(None, ["bfloat16", "float32"]), (False, ["float32"] * 2)])
def test_bf16_replaces_fp16_where_it_is_native_and_allowed(bf16, expected):
    speed = SpeedConfig(mixed_precision=True, use_bf16=bf16)
    assert [dtype_without_fp16(speed, device) for device in (RTX_5090, T4)] == expected


def test_no_bf16_with_explicit_mixed_precision_is_fp16():
    speed = resolve({"use_bf16": False, "mixed_precision": True}).speed
    assert choose_dtype(speed, RTX_5090) == "float16"
