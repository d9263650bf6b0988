"""Classes of diffusers that it computes itself, narrow and with random weights; the layouts are published."""

from typing import Any

import diffusers
import torch

_DC_TYPES = ("ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock")
_SCALES = ((), (), (5,), (5,))
CONFIGS: dict[str, dict[str, Any]] = {
    "AutoencoderDC": {
        "latent_channels": 8,
        "attention_head_dim": 8,
        **{f"{half}_block_types": _DC_TYPES for half in ("encoder", "decoder")},
        **{f"{half}_block_out_channels": (16, 16, 32, 32) for half in ("encoder", "decoder")},
        **{f"{half}_layers_per_block": (1, 1, 1, 1) for half in ("encoder", "decoder")},
        **{f"{half}_qkv_multiscales": _SCALES for half in ("encoder", "decoder")},
        # as in dc-ae-f32c32-in
        "decoder_norm_types": ("batch_norm", "batch_norm", "rms_norm", "rms_norm"),
        "decoder_act_fns": ("relu", "relu", "silu", "silu"),
        "scaling_factor": 0.41407,
    },
    "AutoencoderKLWan": {  # Wan 2.2
        "base_dim": 8,
        "decoder_base_dim": 16,
        "z_dim": 12,
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.1 * channel for channel in range(12)],
        "latents_std": [1.0 + 0.1 * channel for channel in range(12)],
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (32, 32, 32, 32, 32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 32,
        "sample_size": 64,
        "scaling_factor": 0.75289,
    },
    "AutoencoderKLCosmos": {
        "latent_channels": 8,
        "encoder_block_out_channels": (16, 32, 32, 32),
        "decode_block_out_channels": (32, 32, 32, 32),
        "num_layers": 1,
        "resolution": 64,
        "latents_mean": [0.01 * number for number in range(24)],  # of 3 frames
        "latents_std": [1.0] * 24,
    },
    "AutoencoderKLKVAE": {
        "channels": 32,
        "num_enc_blocks": 1,
        "num_dec_blocks": 1,
        "z_channels": 8,
        "ch_mult": (1, 1, 2, 2),
    },
}
# In their published sizes, for memory; the defaults of diffusers are published ones too.
_DC_WIDTHS, _DC_BLOCKS = (128, 256, 512, 512, 1024, 1024), ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
PUBLISHED: dict[str, dict[str, Any]] = {
    "AutoencoderDC": {  # dc-ae-f32c32-sana-1.0
        "latent_channels": 32,
        "attention_head_dim": 32,
        **{f"{half}_block_types": _DC_BLOCKS for half in ("encoder", "decoder")},
        **{f"{half}_block_out_channels": _DC_WIDTHS for half in ("encoder", "decoder")},
        "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
        "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
        **{f"{half}_qkv_multiscales": ((), (), (), (5,), (5,), (5,)) for half in ("encoder", "decoder")},
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
    },
    "AutoencoderKLWan": {  # Wan2.2-TI2V-5B
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
    "AutoencoderKLHunyuanImage": {  # HunyuanImage-2.1
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "layers_per_block": 2,
        "spatial_compression_ratio": 32,
        "sample_size": 384,
    },
    "AutoencoderKLCosmos": {},
    "AutoencoderKLKVAE": {},
}
CONFIGS = {name: config for name, config in CONFIGS.items() if hasattr(diffusers, name)}  # 0.42 has all
VIDEO = ("AutoencoderKLWan", "AutoencoderKLCosmos")


def build(name: str, **changes: Any) -> torch.nn.Module:
    """The class of this name; its norms differ from ones, so that swapped tensors are detected."""
    torch.manual_seed(5)
    model = getattr(diffusers, name)(**{**CONFIGS[name], **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def latents_and_images(model: torch.nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mode of the latents (B, Z, h, w) and the reconstruction of images (B, 3, H, W)."""
    is_video = type(model).__name__ in VIDEO
    encoded = model.encode(images.unsqueeze(2) if is_video else images)
    latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    recon = model.decode(latents).sample
    return (latents.squeeze(2), recon.squeeze(2)) if is_video else (latents, recon)
