"""A trained 2-D network back in the file of the video VAE that it is a part of (vae.interop.wan_names)."""

from pathlib import Path

import torch

from vae.config.options import build
from vae.device import DTYPES
from vae.interop.diffusers_folder import read_config, save_diffusers_folder
from vae.interop.families import latents_config
from vae.interop.fitting import check_fit
from vae.interop.safetensors_file import read_tensors, stored_weights, write_safetensors
from vae.interop.vae_files import read_vae
from vae.interop.vae_path import locate_vae
from vae.interop.wan_names import into_wan
from vae.model.autoencoder import AutoencoderKL
from vae.system import console
from vae.system.errors import UserError

FLAG = "--into"


def write_into(video: Path, output: Path, model: AutoencoderKL, dtype: str) -> None:
    """Write the video VAE at `video` with the last time slices of `model`, with the names of its file.

    A folder is written if `video` is one, else a single file. Raises UserError if it is another network.
    """
    where, file = f"{FLAG} {video}", read_vae(video, flag=FLAG)
    if file.kind != "wan" or model.config.family != "wan":
        other = "--vae" if model.config.family != "wan" else where
        raise UserError(f"{FLAG} is for Wan 2.1 and Qwen-Image, and {other} is another network: omit it")
    check_fit(build(file.shape).model, model.state_dict(), "--vae")
    located = locate_vae(video, FLAG)
    tensors, metadata = read_tensors(located.weights, where)
    kept = {name: value.to(DTYPES[dtype]) for name, value in tensors.items()}
    stored = into_wan(kept, stored_weights(model, dtype))
    if located.config is None:
        write_safetensors(output, stored, metadata)
    else:
        config = read_config(located.config, where) | latents_config(model.bn)
        save_diffusers_folder(output, stored, config, metadata)
    new = model.state_dict()
    of_encoder = [name for name in file.weights if name.startswith(("encoder.", "quant_conv."))]
    same = all(torch.equal(new[n].flatten().cpu(), file.weights[n].flatten()) for n in of_encoder)
    latents = "unchanged" if same else "new: models that were trained on the old ones do not fit"
    console.info(f"written: {output} ({dtype}); its latents are {latents}")
    console.warning(
        "single images are exactly those of the trained network, but videos are not: keep the original for "
        "them"
    )
