"""Which positions of the latents are masked in training (arXiv 2512.05394).

The decoder gets the mean of each channel at masked positions, a running value of earlier steps. The paper
learns this token; a mean needs no parameter, optimizer state or place in the files of a VAE.
"""

import torch
from torch import Tensor

SHARES = (0.25, 0.5, 0.75)  # of the positions of a masked image, each for a third of them: the paper's


def kept_positions(image_draws: Tensor, position_draws: Tensor, probability: float) -> Tensor:
    """Whether a position keeps its latent vector, (B, 1, h, w), from uniform draws in [0, 1].

    An image is masked if its draw (B, 1, 1, 1) is below `probability`, which the paper sets to 0.3.
    """
    shares = torch.zeros_like(image_draws)
    for number, share in enumerate(SHARES):
        third = probability * (len(SHARES) - number) / len(SHARES)
        shares = torch.where(image_draws < third, share, shares)
    return position_draws >= shares
