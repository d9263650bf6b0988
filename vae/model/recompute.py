"""Recompute levels: what the network saves for backward, and what backward recomputes.

All levels give the same gradients. Each level needs less memory and more time than the one before it.
"""

from dataclasses import dataclass
from typing import Literal

from vae.model.autoencoder import AutoencoderKL
from vae.model.layers import ResnetBlock
from vae.model.tiny import TinyDecoder


@dataclass(frozen=True)
class RecomputeLevel:
    """What backward recomputes."""

    resnets: Literal["none", "activations", "block"] = "none"  # of each: nothing, activations, all but x
    encoder: bool = False  # the whole encoder, from the images
    full_resolution: bool = False  # the encoder's first and the decoder's last resolution
    every_resolution: bool = False  # each one and the mid blocks; the start of the last one is nested


RECOMPUTE_LEVELS = {
    "none": RecomputeLevel(),
    "activations": RecomputeLevel("activations"),
    "top_level": RecomputeLevel("activations", full_resolution=True),
    "blocks": RecomputeLevel("block"),
    "blocks_encoder": RecomputeLevel("block", encoder=True),
    "all": RecomputeLevel("block", every_resolution=True),
}


def set_recompute(autoencoder: AutoencoderKL, name: str) -> None:
    """Apply the recompute level `name` to the network, starting with its next forward."""
    level = RECOMPUTE_LEVELS[name]
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    for module in autoencoder.modules():
        if isinstance(module, ResnetBlock):
            module.recompute = level.resnets
    encoder.mid_block.checkpointed = level.every_resolution
    for down_block in encoder.down_blocks:
        down_block.checkpointed = level.every_resolution
    encoder.down_blocks[0].checkpointed |= level.full_resolution
    encoder.checkpointed = level.encoder
    if isinstance(decoder, TinyDecoder):
        decoder.checkpointed = level.full_resolution or level.resnets == "block"
        return
    decoder.mid_block.checkpointed = level.every_resolution
    for up_block in decoder.up_blocks:
        up_block.checkpointed = level.every_resolution
    last = decoder.up_blocks[-1]
    last.checkpointed |= level.full_resolution
    last.start_checkpointed = level.every_resolution
