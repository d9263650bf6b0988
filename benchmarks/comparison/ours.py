"""Our side: the trainer's step, with networks built in the same way as in the trainer."""

import torch

from benchmarks.comparison.work import SEED, Work
from vae.config.options import OptimConfig
from vae.losses.terms import build_terms
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.model.discriminator import Discriminator
from vae.model.initialization import initialize
from vae.step import Networks, StepInputs, compute_gradients, micro_batch_sizes
from vae.training.precision import compile_in_place
from vae.training.schedule import REFERENCE_PEAK
from vae.update import UpdateState, apply_update


class Ours:
    """Networks, optimizers and one batch of `work`; weights are fp32, and `dtype` is the compute dtype."""

    def __init__(
        self,
        work: Work,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        recompute: str = "none",
        channels_last: bool = True,
        micro_batch: int | None = None,
        compiled: bool = False,
    ):
        self.work = work
        self.sizes = micro_batch_sizes(work.batch, micro_batch or work.batch)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        autoencoder, discriminator = _networks(work, device)
        autoencoder.to(device, memory_format=layout)
        set_recompute(autoencoder, recompute)
        if discriminator is not None:
            discriminator.to(device, memory_format=layout)
        terms = build_terms(work.loss, dtype, device)
        self.networks = Networks(autoencoder, discriminator, terms, dtype, channels_last)
        self.inputs = StepInputs(
            images=work.images(device),
            noise=work.noise(device),
            image_share=1 / work.batch,
            loss_scale=torch.ones((), device=device),
            adversarial_factor=torch.ones((), device=device) if work.adversarial else None,
        )
        if compiled:
            compile_in_place(autoencoder)
        if device.type != "meta":
            trained = [network for network in (autoencoder, discriminator) if network is not None]
            self.optim = OptimConfig()
            self.optimizers = [
                torch.optim.AdamW(network.parameters(), REFERENCE_PEAK, fused=True) for network in trained
            ]
            self.update = UpdateState.begin(device, fp16=False)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward, losses and backward; returns the sums of the loss terms."""
        return compute_gradients(self.networks, self.inputs, self.sizes)

    def step(self) -> None:
        """One whole step: gradients, clipping, update."""
        self.gradients()
        apply_update(self.optimizers, self.update, self.optim, fp16=False, empty=False)

    def clear(self) -> None:
        """Delete the gradients."""
        for network in (self.networks.autoencoder, self.networks.discriminator):
            if network is not None:
                network.zero_grad(set_to_none=True)


def _networks(work: Work, device: torch.device) -> tuple[AutoencoderKL, Discriminator | None]:
    meta = device.type == "meta"
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        autoencoder = AutoencoderKL(work.model)
        loss = work.loss
        discriminator = Discriminator(loss.disc_channels, loss.disc_layers) if work.adversarial else None
    if not meta:
        initialize(autoencoder, "default", SEED)
    return autoencoder, discriminator
