"""The images that export_vae.py measures on: centre crops, spread over a folder or a manifest.

Shapes: S = image_size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vae.config.trained_vae_flags import ExportConfig
from vae.data.dataset import FolderImages, Images
from vae.data.loading import load_validation
from vae.data.manifest import image_root, is_manifest, train_and_val
from vae.images.folder import list_images
from vae.images.pixels import to_float
from vae.interop.vae_files import LoadedVae
from vae.system.errors import DataError, UserError

DEFAULT_IMAGE_SIZE = 256  # px


@dataclass(frozen=True)
class Crops:
    """Centre crops of a set of images."""

    images: Images
    image_size: int

    @classmethod
    def of(cls, path: str, config: ExportConfig, loaded: LoadedVae) -> "Crops":
        """The images at `path`, of a manifest its training images."""
        if is_manifest(path):
            names, _ = train_and_val(path, fold=None, val_split=0.0, seed=0)
        else:
            names = list_images(path)
        stride = max(1, len(names) // config.num_images) if config.num_images else 1
        names = names[::stride][: config.num_images or None]
        factor = loaded.autoencoder.downsampling
        size = config.image_size or loaded.file.sample_size or DEFAULT_IMAGE_SIZE
        if size % factor:
            raise UserError(
                f"--image_size {size} is not a multiple of {factor}: try {-(-size // factor) * factor}"
            )
        return cls(FolderImages(image_root(path), names), size)

    def batches(self, limit: int | None = None) -> Iterator[torch.Tensor]:
        """Yield fp32 (1, 3, S, S) in [-1, 1]; DataError if no image can be used."""
        num_yielded, rejected = 0, []
        for batch in load_validation(
            self.images, range(len(self.images)), image_size=self.image_size, batch_size=1
        ):
            rejected += batch.rejected
            for image in batch.images:
                num_yielded += 1
                yield to_float(image[None])
            if num_yielded == limit:
                return
        if not num_yielded:
            reason = f": {rejected[0]}" if rejected else ""
            raise DataError(
                f"--data_path {self.images.location}: none of {len(self.images)} images gives a crop of "
                f"{self.image_size} px{reason}; lower --image_size or give other images"
            )
