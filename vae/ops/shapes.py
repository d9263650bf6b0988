"""Tensor types with shapes; tests check them at each call of a function that is annotated with them.

Dimensions with the same name have the same size within one call: B images, H x W pixels, h x w positions of
a feature map, C channels, Z latent channels.
"""

import sys
from typing import TYPE_CHECKING, Annotated

from torch import Tensor

if TYPE_CHECKING:
    from typing import Annotated as Float
else:
    # tests/conftest.py imports jaxtyping before this module; everywhere else these are plain tensors
    Float = getattr(sys.modules.get("jaxtyping"), "Float", Annotated)

Images = Float[Tensor, "B 3 H W"]  # RGB: all that losses see
AnyImages = Float[Tensor, "B channels H W"]  # grey, RGB, or RGB and alpha
Latents = Float[Tensor, "B Z h w"]
Moments = Float[Tensor, "B twice_Z h w"]
Features = Float[Tensor, "B C h w"]
Logits = Float[Tensor, "B *patches"]
PerImage = Float[Tensor, "B"]
Scalar = Float[Tensor, ""]
