"""Scores of probabilities by scikit-learn, a paired bootstrap, and the table and files that show them.

Shapes: N images, K classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vae.system.console import printable
from vae.system.files import write_csv_rows

RESAMPLES = 2000


def scores(targets: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """top1, top5, macro_f1, log_loss, recall of each class, and the confusion matrix (rows: true classes)."""
    from sklearn import metrics

    classes = np.arange(probabilities.shape[1])
    predicted = probabilities.argmax(1)
    top5 = 1.0  # with five classes or fewer
    if len(classes) > 5:
        top5 = metrics.top_k_accuracy_score(targets, probabilities, k=5, labels=classes)
    report = metrics.classification_report(
        targets, predicted, labels=classes, output_dict=True, zero_division=0
    )
    shares = probabilities / probabilities.sum(1, keepdims=True)
    return {
        "top1": float((predicted == targets).mean()),
        "top5": float(top5),
        "macro_f1": float(report["macro avg"]["f1-score"]),
        "log_loss": float(metrics.log_loss(targets, shares, labels=classes)),
        "recall": [float(report[str(number)]["recall"]) for number in classes],
        "confusion": metrics.confusion_matrix(targets, predicted, labels=classes).tolist(),
    }


def paired_bootstrap(first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Mean of first - second, its interval of 95 %, and the share of resamples above 0.

    Groups are drawn, with replacement and the same for both, because their images are not independent.
    """
    difference = first.astype(float) - second.astype(float)
    _, group = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(group, difference), np.bincount(group)
    random = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for resample in range(RESAMPLES):  # one by one: of 50,000 groups, all together need gigabytes
        drawn = random.integers(0, len(sums), len(sums))
        means[resample] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, [0.025, 0.975])
    share = float((means > 0).mean() + (means == 0).mean() / 2)
    return {"difference": float(difference.mean()), "low": float(low), "high": float(high), "share": share}


def compared_with_first(
    probabilities: Mapping[str, np.ndarray], targets: np.ndarray, groups: np.ndarray
) -> list[dict[str, Any]]:
    """Each other VAE against the first: the difference of the top-1 accuracy, by a paired bootstrap."""
    correct = {name: values.argmax(1) == targets for name, values in probabilities.items()}
    (first, reference), *others = correct.items()
    return [
        {"first": name, "second": first} | paired_bootstrap(values, reference, groups)
        for name, values in others
    ]


def score_lines(
    classes: Sequence[str], scores_of: Mapping[str, Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The scores of each head on each kind of maps, and the differences of VAEs, as printed."""
    width = max(len(printable(name)) for name in scores_of)
    lines = ["", f"{'':{width}}  head      top-1   top-5   macro F1  log loss  worst recall"]
    for name, heads in scores_of.items():
        for head, score in heads.items():
            worst = int(np.argmin(score["recall"]))
            lines.append(
                f"{printable(name):{width}}  {head:8}  {score['top1']:6.1%}  "
                f"{score['top5']:6.1%}  {score['macro_f1']:8.3f}  {score['log_loss']:8.3f}  "
                f"{score['recall'][worst]:.0%} {printable(classes[worst])}"
            )
    lines += [
        f"{printable(pair['first'])} - {printable(pair['second'])}: top-1 "
        f"{pair['difference']:+.1%}, 95 % interval {pair['low']:+.1%} to {pair['high']:+.1%}"
        for pair in pairs
    ]
    return lines


def write_probabilities(
    path: Path, names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray
) -> None:
    """A CSV file of (N, K): one row per image, one column per class."""
    shares = probabilities / probabilities.sum(1, keepdims=True)
    rows = [[name, *(f"{share:.6f}" for share in row)] for name, row in zip(names, shares, strict=True)]
    write_csv_rows(path, [["id", *classes], *rows])
