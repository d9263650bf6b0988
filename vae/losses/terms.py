"""The terms of the training loss: step, records, summary and memory plan read this list and know no names.

A term is a weight in `LossConfig`, declared with `term_weight`, and a module of this package: NAME_weight
belongs to `NAME.py`. There, `build(loss, dtype, device)` returns a label for the summary and a function with
one value per image, in fp32 at least. A frozen network is such a function. An image term is 0 for equal
images. No function may couple images, depend on the size of the crop, or read a value back to the host.
`device` may be meta, where nothing is read or printed. The function of a view returns other latents to
decode, or the images to compare them with.

The adversarial loss is no term: its weight changes with every step, and its discriminator is trained.
"""

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from vae.config.options import LossConfig

TermFunction = Callable[..., Any]  # of the arguments that LossTerms names; (b,), or a list of views


class Term(NamedTuple):
    """One term of the loss."""

    name: str  # in the records
    label: str  # in the summary of a run
    weight: float
    function: TermFunction

    def __str__(self) -> str:
        return f"{self.weight:g} {self.label}"


class LossTerms(NamedTuple):
    """All terms of a loss, by what they see."""

    image: tuple[Term, ...] = ()  # f(recon, images), (b, 3, H, W) in [-1, 1]: differentiated down to recon
    # f(mean, logvar, pixels, statistics): the posterior, (b, Z, h, w); pixels of an image; RunningStatistics
    # of earlier steps, or None if no term needs them
    latent: tuple[Term, ...] = ()
    # f(x, unit, side): views of latents, which are decoded, or of images (equivariance.py). The term
    # is the mean of the weighted image terms of its views.
    view: tuple[Term, ...] = ()
    # f(images): the latents of --teacher, which the decoder decodes and the encoder learns; the term is their
    # mean squared difference from the mean. Added by vae.interop.teacher.
    teacher: tuple[Term, ...] = ()

    @property
    def all(self) -> tuple[Term, ...]:
        """The terms of every kind."""
        return (*self.image, *self.latent, *self.view, *self.teacher)

    @property
    def image_text(self) -> str:
        """The weighted image terms in words: what a validation loss is the sum of."""
        return " + ".join(map(str, self.image))

    def weighted_sum(self, means: dict[str, float]) -> float:
        """The loss from the mean of each term."""
        return sum(term.weight * means[term.name] for term in self.all)

    def networks(self) -> list[nn.Module]:
        """The frozen networks among the functions."""
        functions = [term.function for term in self.all]
        return [function for function in functions if isinstance(function, nn.Module)]


def build_terms(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> LossTerms:
    """The terms with a weight, and those that are always recorded; networks are in `dtype` on `device`.

    Raises UserError if the weights of a network are missing.
    """
    terms: dict[str, list[Term]] = {kind: [] for kind in LossTerms._fields}
    for item in fields(loss):
        weight = getattr(loss, item.name)
        if "term" in item.metadata and (weight or item.metadata["always"]):
            name = item.name.removesuffix("_weight")
            label, function = import_module(f"vae.losses.{name}").build(loss, dtype, device)
            terms[item.metadata["term"]].append(Term(name, label, weight, function))
    return LossTerms(**{kind: tuple(of_kind) for kind, of_kind in terms.items()})
