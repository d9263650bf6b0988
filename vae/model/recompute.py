"""The ladder of recomputation: what the network keeps for its backward, and what it computes again.

Every rung gives the same gradients; from one to the next the step takes less memory and more time, but for
"encoder" and "blocks", which are alike: up to 1024 px the first has less arithmetic, at 2048 the second.
"""

from dataclasses import dataclass

from vae.model.autoencoder import AutoencoderKL
from vae.model.layers import ResnetBlock


@dataclass(frozen=True)
class Rung:
    """What is computed again in the backward."""

    block: str = "none"  # of each residual block: nothing, its activations, or all but its input
    top_level: bool = False  # the levels of full resolution, from the image and from half the resolution
    levels: bool = False  # every level and middle, one at a time, and the last one's start once more
    encoder: bool = False  # the whole encoder, from the images


RECOMPUTE_LEVELS = {
    "none": Rung(),
    "activations": Rung("activations"),
    "top_level": Rung("activations", top_level=True),
    "encoder": Rung("activations", encoder=True),
    "blocks": Rung("block"),
    "blocks_encoder": Rung("block", encoder=True),
    "all": Rung("block", levels=True),
}


def set_recompute(autoencoder: AutoencoderKL, name: str) -> None:
    """Put the network on the rung `name` of the ladder, from its next forward on."""
    rung = RECOMPUTE_LEVELS[name]
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    for module in autoencoder.modules():
        if isinstance(module, ResnetBlock):
            module.recompute = rung.block
    for half in (encoder, decoder):
        half.fused_out = rung.block != "none"
        half.mid_block.checkpointed = rung.levels
    for level in [*encoder.down_blocks, *decoder.up_blocks]:
        level.checkpointed = rung.levels
    encoder.down_blocks[0].checkpointed |= rung.top_level
    decoder.up_blocks[-1].checkpointed |= rung.top_level
    decoder.up_blocks[-1].start_checkpointed = rung.levels
    encoder.checkpointed = rung.encoder
