"""Validation by slice: the mean PSNR of each label, so that a group of images cannot fail unseen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vae.evaluation.metrics import Sums
from vae.system.console import printable
from vae.training.distributed import Distributed

MAX_SLICES = 100  # more labels are names of single images rather than of groups


@dataclass
class Slices:
    """The labels of the validation images."""

    labels: list[str] = field(default_factory=list)  # of all processes, sorted; empty: no slices
    of_image: dict[int, str] = field(default_factory=dict)  # by index, of this process's images

    @classmethod
    def of(cls, labels_of_images: dict[int, str | None], dist: Distributed) -> "Slices":
        """The slices of all processes, from the labels of this one's images."""
        of_image = {index: label for index, label in labels_of_images.items() if label}
        labels = dist.all_gather_set(set(of_image.values()))
        if not 1 < len(labels) <= MAX_SLICES:
            return cls()
        return cls(sorted(labels), of_image)

    def sums(self, indices: Sequence[int], psnr: Sequence[float]) -> dict[str, Sums]:
        """The PSNR of the images at these indices, summed by label."""
        if not self.labels:
            return {}
        psnr_of: dict[str, list[float]] = {}
        for index, value in zip(indices, psnr, strict=True):
            if index in self.of_image:
                psnr_of.setdefault(self.of_image[index], []).append(value)
        return {label: {"psnr": (sum(values), len(values))} for label, values in psnr_of.items()}

    def means(self, sums: dict[str, Sums], dist: Distributed) -> dict[str, float]:
        """The mean PSNR of each label over the images of all processes."""
        parts = [sums.get(label, {}).get("psnr", (0.0, 0)) for label in self.labels]
        totals = dist.all_reduce_scalars(*[number for part in parts for number in part]) if parts else []
        pairs = zip(self.labels, totals[::2], totals[1::2], strict=True)
        return {label: total / count for label, total, count in pairs if count}


def slice_record(psnr: dict[str, float]) -> dict[str, float | str]:
    """What a record says about the slices: their number, the mean over them, and the worst one."""
    if not psnr:
        return {}
    worst = min(psnr, key=lambda label: (psnr[label], label))
    return {
        "slices": len(psnr),
        "slice_mean_psnr": sum(psnr.values()) / len(psnr),
        "slice_worst_psnr": psnr[worst],
        "worst_slice": worst,
    }


def slice_text(record: dict[str, float | str]) -> str:
    """The worst slice, for the line of a validation."""
    if not record:
        return ""
    worst = printable(str(record["worst_slice"]))
    psnr = record["slice_worst_psnr"]
    return f" | worst of {record['slices']} labels: {worst}, {psnr:.2f} dB"
