"""Decode latents without this project, with a VAE that it exports as a folder, also at twice the size.

LATENTS is a file of infer_vae.py --mode encode: python examples/decode_latents.py FOLDER LATENTS OUTPUT.png
"""

import json
import sys
from pathlib import Path

import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

folder, latents, output = map(Path, sys.argv[1:])
config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
weights = load_file(folder / "diffusion_pytorch_model.safetensors")


def layer(h, name):  # a convolution, or a linear layer of attention, if the network has it
    if f"{name}.weight" not in weights:
        return h
    weight, bias = weights[f"{name}.weight"].float(), weights[f"{name}.bias"].float()
    if weight.dim() == 2:
        return F.linear(h, weight, bias)
    mode = config.get("padding_mode", "zeros").replace("zeros", "constant")
    return F.conv2d(F.pad(h, [weight.shape[2] // 2] * 4, mode=mode), weight, bias)


def norm(h, name):
    weight = weights[f"{name}.weight"].float()
    if f"{name}.bias" not in weights:  # Wan 2.1 and Qwen-Image
        return F.normalize(h, dim=1) * len(weight) ** 0.5 * weight[:, None, None]
    return F.group_norm(h, config["norm_num_groups"], weight, weights[f"{name}.bias"].float(), eps=1e-6)


def block(x, name):
    h = layer(F.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
    return layer(x, f"{name}.conv_shortcut") + layer(F.silu(norm(h, f"{name}.norm2")), f"{name}.conv2")


def attention(x, name):
    h = norm(x, f"{name}.group_norm").flatten(2).mT  # (1, positions, C)
    h = F.scaled_dot_product_attention(*(layer(h, f"{name}.to_{part}") for part in "qkv"))
    return x + layer(h, f"{name}.to_out.0").mT.reshape(x.shape)


h = layer(layer(load_file(latents)["latents"].float()[None], "post_quant_conv"), "decoder.conv_in")
h = block(h, "decoder.mid_block.resnets.0")
if any(".mid_block.attentions.0." in name for name in weights):
    h = attention(h, "decoder.mid_block.attentions.0")
h = block(h, "decoder.mid_block.resnets.1")
for name in sorted(name for name in weights if name.startswith("decoder.up_blocks.")):  # from the latents
    if name.endswith(".conv1.weight"):
        h = block(h, name.removesuffix(".conv1.weight"))
    elif name.endswith(".upsamplers.0.conv.weight"):
        h = layer(F.interpolate(h, scale_factor=2), name.removesuffix(".weight"))
h = layer(F.silu(norm(h, "decoder.conv_norm_out")), "decoder.conv_out")  # (1, C or 4C, H, W)
scale = 1 if h.shape[1] == config["in_channels"] else 2
pixels = ((F.pixel_shuffle(h, scale)[0] + 1) * 127.5).round().clamp(0, 255).byte()  # grey, RGB or RGBA
Image.fromarray(pixels.permute(1, 2, 0).numpy().squeeze()).save(output)
