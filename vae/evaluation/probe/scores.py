"""Scores of out-of-fold probabilities, by scikit-learn, weights of an ensemble, and a paired bootstrap.

Shapes: N images, K classes.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
TEMPERATURE = 0.1  # log loss that scales an ensemble weight by 1/e


def scores(targets: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """top1, top5, macro_f1, log_loss, recall of each class, and the confusion matrix (rows: true classes)."""
    from sklearn import metrics

    classes = np.arange(probabilities.shape[1])
    predicted = probabilities.argmax(1)
    k = min(5, len(classes) - 1)
    top5 = 1.0  # with five classes or fewer
    if len(classes) > 5:
        top5 = metrics.top_k_accuracy_score(targets, probabilities, k=k, labels=classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that is never predicted: F1 is 0
        f1 = metrics.f1_score(targets, predicted, labels=classes, average="macro", zero_division=0)
        recall = metrics.recall_score(targets, predicted, labels=classes, average=None, zero_division=0)
    sums = probabilities / probabilities.sum(1, keepdims=True)
    return {
        "top1": float((predicted == targets).mean()),
        "top5": float(top5),
        "macro_f1": float(f1),
        "log_loss": float(metrics.log_loss(targets, sums, labels=classes)),
        "recall": [float(value) for value in recall],
        "confusion": metrics.confusion_matrix(targets, predicted, labels=classes).tolist(),
    }


def ensemble_weights(losses: Sequence[float]) -> np.ndarray:
    """Weights of heads by their log loss on the stopping folds, which sum to 1."""
    powers = np.exp(-(np.array(losses) - min(losses)) / TEMPERATURE)
    return powers / powers.sum()


def paired_bootstrap(
    first: np.ndarray, second: np.ndarray, groups: np.ndarray, seed: int = 0
) -> dict[str, float]:
    """Mean of first - second, its interval of 95 %, and the share of resamples above 0.

    Groups are drawn, with replacement and the same for both, because their images are not independent.
    """
    difference = first.astype(float) - second.astype(float)
    _, group = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(group, difference), np.bincount(group)
    random = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for resample in range(RESAMPLES):  # one by one: of 50,000 groups, all together need gigabytes
        drawn = random.integers(0, len(sums), len(sums))
        means[resample] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, [0.025, 0.975])
    share = float((means > 0).mean() + (means == 0).mean() / 2)
    return {"difference": float(difference.mean()), "low": float(low), "high": float(high), "share": share}


def compared_with_first(
    names: Sequence[str], probabilities: Sequence[np.ndarray], targets: np.ndarray, groups: np.ndarray
) -> list[dict[str, Any]]:
    """Each other VAE against the first: the difference of the top-1 accuracy, by a paired bootstrap."""
    correct = [found.argmax(1) == targets for found in probabilities]
    return [
        {"first": name, "second": names[0]} | paired_bootstrap(values, correct[0], groups)
        for name, values in zip(names[1:], correct[1:], strict=True)
    ]
