"""Constants of our operations as benchmarks/first_hour.py measured them on a card."""

from vae.gpus import measured_values
from vae.ops import attention, gpu_blocks

CONSTANTS = {
    "TILE_ELEMENTS": gpu_blocks,
    "NUM_WARPS": gpu_blocks,
    "REDUCTION_PROGRAMS": gpu_blocks,
    "NHWC_COLUMNS": gpu_blocks,
    "QUERIES_PER_CHANNEL": attention,
}
_DEFAULTS = {name: getattr(module, name) for name, module in CONSTANTS.items()}


def use_measured(device_name: str) -> None:
    """Use what was measured on the card that drivers call `device_name`; without a file, the defaults."""
    found = measured_values(device_name).get("constants", {})
    for name, module in CONSTANTS.items():
        setattr(module, name, found.get(name, _DEFAULTS[name]))
