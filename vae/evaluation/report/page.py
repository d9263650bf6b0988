"""The report of a comparison: one HTML file that needs no other file and no network."""

from pathlib import Path

from vae.evaluation.report.charts import channel_chart, curve_charts, line_styles, noise_charts
from vae.evaluation.report.images import articles
from vae.evaluation.report.latent_tables import (
    diffusability_table,
    equivariance_table,
    grid_table,
    latent_table,
)
from vae.evaluation.report.tables import (
    configuration_tables,
    hardest_table,
    quality_tables,
    speed_tables,
)
from vae.evaluation.results import ERROR_GAIN, METRICS, Results
from vae.evaluation.summary import diffusion_lines
from vae.html import write_page


def write_report(results: Results, path: Path) -> None:
    """Write the report to `path` atomically; the image files of its samples are read and embedded."""
    styles = line_styles(results.vaes)
    write_page(
        path,
        "report.html.jinja",
        names=[vae.name for vae in results.vaes if vae.is_network],
        has_references=any(not vae.is_network for vae in results.vaes),
        protocol=results.protocol,
        environment=results.environment,
        quality=quality_tables(results),
        missing={_title(name): reason for name, reason in results.missing.items()},
        images=articles(results),
        error_gain=ERROR_GAIN,
        hardest=hardest_table(results),
        speed=speed_tables(results),
        latents=latent_table(results),
        channel_charts=[channel_chart(vae.name, vae.latents) for vae in results.vaes if vae.latents],
        diffusability=diffusability_table(results),
        verdicts=diffusion_lines(results),
        noise_charts=noise_charts(results.vaes),
        equivariance=equivariance_table(results),
        grid_artefacts=grid_table(results),
        line_styles=styles,
        curve_styles={vae.name: styles[vae.name] for vae in results.vaes if vae.curves},
        curves=curve_charts(results.vaes),
        configuration=configuration_tables(results),
    )


def _title(missing: str) -> str:
    """The title of a missing metric, with its size; other missing things are named as they are."""
    name, at, size = missing.partition(" at ")
    return METRICS[name].title + at + size if name in METRICS else missing
