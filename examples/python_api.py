"""The Python API in one script: train a tiny VAE, then load, encode, decode, evaluate and export it.

Run it from the repository's root; editors such as VS Code also run each `# %%` cell on its own:

    python prepare_data.py --mode demo      # draws images into data/demo, unless you have some
    python examples/python_api.py
"""

# %% Choose the image files and the folder for all results
import os
import sys
from pathlib import Path

sys.path.insert(0, os.getcwd())  # the package `vae` is in the repository's root

import vae

images_dir = Path(os.environ.get("IMAGES", "data/demo"))
results_dir = Path(os.environ.get("RESULTS", "outputs/python_api"))

# %% Train a tiny VAE: the options are the flags of train_vae.py
try:
    result = vae.train(
        data_path=images_dir,
        output_dir=results_dir / "run",
        profile="demo",
        channels=[16, 32, 32],  # three levels: 4x downsampling
        image_size=64,
        max_steps=20,
        num_workers=0,
    )
except vae.UserError as error:  # for example: no images, or the output folder contains another run
    sys.exit(f"{error}")
print(f"validation PSNR {result.validation['psnr']:.2f} dB, VAE in {result.vae}")

# %% Load it. Checkpoints, diffusers folders and .safetensors files of other programs load in the same way
model = vae.load_vae(result.vae)

# %% Encode one image file, of any size
path = sorted(path for path in images_dir.rglob("*") if path.suffix in (".png", ".jpg"))[0]
images = vae.load_images(path)  # (1, 3, H, W), fp32 in [-1, 1]
latents = vae.encode(model, images)  # (1, Z, h, w)
print(f"images {tuple(images.shape)}, latents {tuple(latents.shape)}")

# %% Decode the latents, and save the image beside the original
decoded = vae.decode(model, latents, size=images.shape[2:])
original, reconstruction = vae.to_pil(images)[0], vae.to_pil(decoded)[0]
original.save(results_dir / "original.png")
reconstruction.save(results_dir / "reconstruction.png")

# %% Latents for a diffusion model: shifted and scaled to about zero mean and unit variance
shift, scaling = model.shift_factor or 0.0, model.scaling_factor or 1.0  # None if a file has no constants
scaled = (latents - shift) * scaling
print(f"scaled latents: mean {scaled.mean():.2f}, std {scaled.std():.2f}")

# %% Measure the VAE on all images. The folder then contains report.html, tables and samples
results = vae.evaluate(
    result.vae, images_dir, results_dir / "evaluation", sizes=[64], max_images=8, perceptual_net="none"
)
print(f"mean PSNR {results.vaes[0].sizes[0].metrics['psnr']:.2f} dB")

# %% Write one file for ComfyUI and other programs
print(
    vae.export(
        result.vae,
        results_dir / "vae.safetensors",
        dtype="fp16",
        data_path=images_dir,  # checks on these images that fp16 is precise enough
        num_images=8,
    )
)
