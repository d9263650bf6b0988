"""--split_seed: runs with several seeds have the same validation images, in another order of training."""

from vae.config.options import build
from vae.training.datasets import find_images


def held_out(image_folder, **options) -> list[str]:
    given = {"data_path": str(image_folder), "val_split": 0.25, **options}
    _, validation = find_images(build(given), given)
    return validation.record()


def test_validation_images_follow_the_split_seed(image_folder):
    of_seed = held_out(image_folder, seed=1)
    assert of_seed == held_out(image_folder, seed=9, split_seed=1)
    assert of_seed != held_out(image_folder, seed=1, split_seed=6)
