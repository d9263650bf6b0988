"""The tables of the report about latents: statistics, diffusion, equivariance, grid artefacts."""

from vae.config.evaluate_flags import WHOLE
from vae.evaluation.diffusability import COVERAGE, DISTANCE, RECONSTRUCTION, SPREAD_OF, VELOCITY, lowest
from vae.evaluation.report.tables import (
    MAX_LISTED,
    Table,
    fixed,
    number_column,
    shown_number,
    size_name,
    text_column,
)
from vae.evaluation.results import Results, VaeResult


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


def equivariance_table(results: Results) -> Table | None:
    """A column per transform."""
    vaes = [vae for vae in results.vaes if vae.equivariance]
    if not vaes:
        return None
    columns = {}
    for name in vaes[0].equivariance:
        transformed = [vae.equivariance.get(name) for vae in vaes]
        columns[f"{name.replace('_', ' ')} ↑"] = number_column(
            [None if values is None else values.latents for values in transformed],
            fixed(2),
            best=max,
            notes=["" if values is None else f"{values.images:.2f}" for values in transformed],
        )
    return Table("Equivariance, dB", [vae.name for vae in vaes], columns)


def comparable(results: Results) -> list[VaeResult]:
    """The VAEs measured for diffusion whose latents have the shape of the first one's."""
    vaes = [vae for vae in results.vaes if vae.diffusability and vae.latents]
    shapes = [(vae.latents.channels, vae.latents.downsampling) for vae in vaes if vae.latents]
    return [vae for vae, shape in zip(vaes, shapes, strict=True) if shape == shapes[0]]


def diffusability_table(results: Results) -> Table | None:
    """A column per measure for diffusion models. The best is marked if it differs by more than the seeds."""
    vaes = [vae for vae in results.vaes if vae.diffusability]
    if not vaes:
        return None
    rivals = {vae.name: vae.diffusability for vae in comparable(results)}
    columns = {}
    for name in vaes[0].diffusability:
        is_significant = name in SPREAD_OF and lowest(name, rivals)[1]
        columns[f"{name}{_arrow(name)}"] = number_column(
            [vae.diffusability[name] for vae in vaes],
            reasons=[results.missing.get(name, "")] * len(vaes),
            best=min if is_significant else None,
            candidates=[vae.name in rivals for vae in vaes],
        )
    size = next(size for size in results.protocol.sizes if size != WHOLE)
    return Table(f"Latents for diffusion, {size_name(size)}", [vae.name for vae in vaes], columns)


def _arrow(measure: str) -> str:
    """Which values are better; nothing for a spread, and for the rank, which is only a warning."""
    if measure.startswith("noise") or measure == COVERAGE:
        return " ↑"
    return " ↓" if measure in (VELOCITY, DISTANCE, RECONSTRUCTION) else ""


def grid_table(results: Results) -> Table | None:
    """Grid artefacts, a column per colour."""
    vaes = [vae for vae in results.vaes if vae.grid_artefacts]
    if not vaes:
        return None
    columns = {}
    for colour in vaes[0].grid_artefacts:
        patterns = [vae.grid_artefacts.get(colour) for vae in vaes]
        columns[f"{colour} ↓"] = number_column(
            [None if pattern is None else pattern.levels for pattern in patterns],
            fixed(3),
            best=min,
            notes=[
                "" if pattern is None or pattern.share is None else f"{100 * pattern.share:.1f} %"
                for pattern in patterns
            ],
        )
    return Table("Grid artefacts, levels", [vae.name for vae in vaes], columns)
