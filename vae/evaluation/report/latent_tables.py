"""The tables of the report about latents: statistics, and measures for diffusion models."""

from vae.config.evaluate_flags import WHOLE
from vae.evaluation.report.tables import (
    MAX_LISTED,
    Table,
    number_column,
    shown_number,
    size_name,
    text_column,
)
from vae.evaluation.results import Results


def latent_table(results: Results) -> Table | None:
    """One row of latent facts per network."""
    rows = [(vae.name, vae.latents) for vae in results.vaes if vae.latents]
    if not rows:
        return None
    facts = [latents for _, latents in rows]
    return Table(
        f"Latents, {size_name(results.protocol.sizes[-1])}",
        [name for name, _ in rows],
        {
            "channels": number_column([fact.channels for fact in facts]),
            "downsampling": number_column([fact.downsampling for fact in facts]),
            "KL, nats/px": number_column([fact.kl_nats_per_pixel for fact in facts]),
            "σ / std(μ)": number_column([fact.sigma_over_std for fact in facts]),
            "means": text_column([_range(fact.mean) for fact in facts]),
            "standard deviations": text_column([_range(fact.std) for fact in facts]),
            "dead channels": text_column([_dead(fact.dead_channels, fact.channels) for fact in facts]),
        },
    )


def _range(values: list[float]) -> str:
    return f"{shown_number(min(values))} to {shown_number(max(values))}"


def _dead(dead: list[int], channels: int) -> str:
    named = f" ({', '.join(map(str, dead[:MAX_LISTED]))}{', ...' if len(dead) > MAX_LISTED else ''})"
    return f"{len(dead)} of {channels}{named if dead else ''}"


def diffusability_table(results: Results) -> Table | None:
    """A column per measure for diffusion models: noise in dB, and the rank, which is only a warning."""
    vaes = [vae for vae in results.vaes if vae.diffusability]
    if not vaes:
        return None
    columns = {
        f"{name}{' ↑' if name.startswith('noise') else ''}": number_column(
            [vae.diffusability[name] for vae in vaes], reasons=[results.missing.get(name, "")] * len(vaes)
        )
        for name in vaes[0].diffusability
    }
    size = next(size for size in results.protocol.sizes if size != WHOLE)
    return Table(f"Latents for diffusion, {size_name(size)}", [vae.name for vae in vaes], columns)
