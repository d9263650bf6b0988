"""Several datasets of evaluate_vae.py: a comparison of each, and their means in one table."""

from dataclasses import replace
from pathlib import Path, PurePath

from vae.config.evaluate_flags import EvaluateConfig
from vae.evaluation.command import COMMAND, RESULTS_NAME, check_command
from vae.evaluation.compare import compare, short_names
from vae.evaluation.report.tables import quality_tables
from vae.evaluation.results import PER_IMAGE, Results, SizeResult, VaeResult, as_json
from vae.evaluation.summary import aligned, write_results_csv
from vae.system import console
from vae.system.addresses import public_text
from vae.system.files import write_json
from vae.system.folder_marker import claim_folder

MEAN = "mean"


def compare_all(config: EvaluateConfig) -> Results:
    """Compare the VAEs on --data_path; if it has several datasets, on each, and on all."""
    if len(config.data_path) == 1:
        return compare(config)
    names = short_names([_folder(path) for path in config.data_path], "--data_path")
    claim_folder(Path(config.output_dir), COMMAND)
    compared: dict[str, Results] = {}
    for name, path in zip(names, config.data_path, strict=True):
        console.info(f"\n{console.printable(name)}")
        folder = Path(config.output_dir) / name.replace("/", "_")
        single = replace(config, data_path=(path,), output_dir=str(folder))
        check_command(single)
        compared[name] = compare(single)
    results = _joined(compared)
    folder = Path(config.output_dir)
    write_results_csv(results, folder / "results.csv")
    write_json(folder / RESULTS_NAME, as_json(results, folder), indent=1)
    for table in quality_tables(results):
        console.info("\n".join(["", *aligned(table)]))
    console.info(f"\nresults of all datasets are in {console.printable(config.output_dir)}")
    return results


def _folder(path: str) -> str:
    """What names a dataset: the folder of a `dataset.json`, or the path itself."""
    shown = PurePath(public_text(path))
    return str(shown.parent if shown.name == "dataset.json" else shown)


def _joined(compared: dict[str, Results]) -> Results:
    """A row for each dataset and VAE, then the mean of each VAE over the datasets."""
    first, *_ = compared.values()
    rows = [
        replace(vae, name=f"{name}: {vae.name}", curves=[], samples=[])
        for name, results in compared.items()
        for vae in results.vaes
    ]
    for same in zip(*(results.vaes for results in compared.values()), strict=True):
        sizes = [_mean(list(sizes_of)) for sizes_of in zip(*(vae.sizes for vae in same), strict=True)]
        rows.append(VaeResult(f"{MEAN}: {same[0].name}", same[0].path, same[0].kind, sizes))
    missing = {
        f"{name}: {what}": why for name, results in compared.items() for what, why in results.missing.items()
    }
    protocol = replace(
        first.protocol,
        data_path=" ".join(results.protocol.data_path for results in compared.values()),
        images=sum(results.protocol.images for results in compared.values()),
    )
    unusable = {
        f"{name}: {image}": why
        for name, results in compared.items()
        for image, why in results.unusable.items()
    }
    return Results(protocol, first.environment, rows, missing, unusable)


def _mean(results: list[SizeResult]) -> SizeResult:
    """The mean of a VAE over the datasets; none of rFID, which belongs to one set of images."""
    metrics: dict[str, float | None] = dict.fromkeys(results[0].metrics)
    for metric in PER_IMAGE:
        values = [result.metrics[metric] for result in results]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            metrics[metric] = sum(known) / len(known)
    return SizeResult(results[0].size, metrics, {})
