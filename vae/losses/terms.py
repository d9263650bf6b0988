"""The terms of the training loss: step, records, summary and memory plan read this list and know no names.

A term is a weight in `LossConfig`, declared with `term_weight`, and a module of this package: NAME_weight
belongs to `NAME.py`. There, `build(loss, dtype, device)` returns a label for the summary and a function with
one value per image, in fp32 at least. A frozen network is such a function. An image term is 0 for equal
images. No function may couple images, depend on the size of the crop, or read a value back to the host.
`device` may be meta, where nothing is read or printed.

The adversarial loss is no term: its weight changes with every step, and its discriminator is trained.
"""

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import NamedTuple

import torch
from torch import nn

from vae.config.options import LossConfig
from vae.ops.shapes import PerImage

TermFunction = Callable[..., PerImage]  # of the arguments that LossTerms names


class Term(NamedTuple):
    """One term of the loss."""

    name: str  # in the records
    label: str  # in the summary of a run
    weight: float
    function: TermFunction


class LossTerms(NamedTuple):
    """All terms of a loss, by what they see."""

    image: tuple[Term, ...] = ()  # f(recon, images), (b, 3, H, W) in [-1, 1]: differentiated down to recon
    latent: tuple[Term, ...] = ()  # f(mean, logvar, pixels): the posterior, (b, Z, h, w); pixels of an image

    def weighted_sum(self, means: dict[str, float]) -> float:
        """The loss from the mean of each term."""
        return sum(term.weight * means[term.name] for term in (*self.image, *self.latent))

    def networks(self) -> list[nn.Module]:
        """The frozen networks among the functions."""
        functions = [term.function for term in (*self.image, *self.latent)]
        return [function for function in functions if isinstance(function, nn.Module)]


def build_terms(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> LossTerms:
    """The terms with a weight, and those that are always recorded; networks are in `dtype` on `device`.

    Raises UserError if the weights of a network are missing.
    """
    terms: dict[str, list[Term]] = {"image": [], "latent": []}
    for item in fields(loss):
        weight = getattr(loss, item.name)
        if "term" in item.metadata and (weight or item.metadata["always"]):
            name = item.name.removesuffix("_weight")
            label, function = import_module(f"vae.losses.{name}").build(loss, dtype, device)
            terms[item.metadata["term"]].append(Term(name, label, weight, function))
    return LossTerms(tuple(terms["image"]), tuple(terms["latent"]))
