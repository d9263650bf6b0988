"""The one decision which dtype a network computes in, for training, plans, inference and checks."""

from dataclasses import dataclass
from typing import Literal

from vae.config.options import SpeedConfig
from vae.system.errors import UserError


@dataclass(frozen=True)
class PrecisionSupport:
    """The dtypes that a device supports. `bf16` is "slow" on a CPU that has no instructions for it."""

    device_name: str
    is_gpu: bool
    bf16: Literal["native", "slow", "none"]

    @property
    def mixed_dtype(self) -> str:
        """The dtype of --mixed_precision: fp16 with loss scaling on a GPU, and on a CPU bf16 if it is fast.

        bf16 has as many bytes and the same rate, but its 8 bits cost smooth images (benchmarks/LOG.md).
        """
        if self.is_gpu:
            return "float16"
        return "bfloat16" if self.bf16 == "native" else "float32"


def choose_dtype(speed: SpeedConfig, support: PrecisionSupport) -> str:
    """The name of the torch dtype for --mixed_precision and --use_bf16.

    --use_bf16 is obeyed wherever bf16 works at all; UserError if it does not. --no-use_bf16 excludes bf16.
    A network whose activations overflow fp16 is computed in `dtype_without_fp16`.
    """
    if speed.use_bf16:
        if support.bf16 == "none":
            raise UserError(
                f"--use_bf16: {support.device_name} has no bf16: use --mixed_precision alone, for fp16"
            )
        return "bfloat16"
    if not speed.mixed_precision:
        return "float32"
    if speed.use_bf16 is False and not support.is_gpu:
        return "float32"
    return support.mixed_dtype


def dtype_without_fp16(speed: SpeedConfig, support: PrecisionSupport) -> str:
    """The dtype that replaces fp16: bf16, or fp32 on a card without bf16 and for --no-use_bf16."""
    return "bfloat16" if support.bf16 == "native" and speed.use_bf16 is not False else "float32"


def precision_remark(speed: SpeedConfig, support: PrecisionSupport) -> str | None:
    """A line about the chosen dtype on a CPU without instructions for bf16, or None."""
    if support.bf16 != "slow":
        return None
    if speed.use_bf16:
        return f"WARNING: --use_bf16: {slow_bf16(support)}: remove the flag to compute in fp32"
    if speed.mixed_precision:
        return f"--mixed_precision: {support.device_name} has no bf16 instructions, so fp32 is used"
    return None


def slow_bf16(support: PrecisionSupport) -> str:
    """The reason why bf16 is slow on a CPU without instructions for it.

    Measured on an AMD EPYC with AVX2 only: one 64-channel convolution takes 84 ms in bf16 and 11 ms in fp32.
    """
    return f"{support.device_name} has no bf16 instructions, and bf16 takes up to 8 times as long as fp32"


def exclude_precisions(given: dict) -> dict:
    """`given` with what an explicit "no" implies: it wins over a profile, a checkpoint and the card.

    --no-use_bf16 alone also switches off a profile's mixed precision, and --no-mixed_precision its bf16.
    """
    implied = {}
    if given.get("use_bf16") is False and "mixed_precision" not in given:
        implied["mixed_precision"] = False
    if given.get("mixed_precision") is False and "use_bf16" not in given:
        implied["use_bf16"] = False
    return {**given, **implied}
