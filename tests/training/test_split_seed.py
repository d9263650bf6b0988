"""--split_seed: runs with several seeds have the same validation images, in another order of training."""

import pytest

from vae.config.options import build
from vae.training.datasets import find_images


def held_out(image_folder, **options) -> list[str]:
    given = {"data_path": str(image_folder), "val_split": 0.25, **options}
    _, validation = find_images(build(given), given)
    return validation.record()


@pytest.mark.parametrize("seed", [1, 2])
def test_validation_images_follow_the_split_seed(image_folder, seed):
    of_seed = held_out(image_folder, seed=seed)
    assert of_seed == held_out(image_folder, seed=9, split_seed=seed)
    assert of_seed != held_out(image_folder, seed=seed, split_seed=seed + 5)
