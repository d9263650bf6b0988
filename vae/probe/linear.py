"""The linear head of a probe: scikit-learn's LogisticRegression.

Shapes: N images, V views of C channels and h x h positions, K classes.
"""

import math
import warnings

import numpy as np
import torch.nn.functional as F

from vae.probe.maps import MapSet

SIDE = 8  # of the map that it sees
MAX_FEATURES = 4096  # larger maps are averaged further
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # C of LogisticRegression, from strong to weak regularization
HELD_OUT = 5  # one of so many groups of training images chooses it
MAX_ITERATIONS = 300


def linear_probabilities(train: MapSet, measured: MapSet, num_classes: int) -> np.ndarray:
    """Probabilities (N, K) of the measured images, never zero.

    The regularization is the one with the lowest log loss on held-out training images. Then all train.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, targets = _features(train), train.targets[train.chosen]

    def fit(strength: float, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=MAX_ITERATIONS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not converged after MAX_ITERATIONS
            model.fit(features[rows], targets[rows])
        probabilities = np.zeros((len(wanted), num_classes))
        probabilities[:, model.classes_] = model.predict_proba(wanted)
        return probabilities.clip(1e-7)

    groups = np.unique(train.groups[train.chosen], return_inverse=True)[1]
    held_out = np.random.default_rng(0).permutation(groups.max() + 1)[groups] % HELD_OUT == 0
    best, best_loss = STRENGTHS[0], math.inf
    for strength in STRENGTHS if len(set(targets[~held_out].tolist())) > 1 else ():
        values = fit(strength, ~held_out, features[held_out])
        loss = -np.log(values[np.arange(len(values)), targets[held_out]]).mean()
        if loss >= best_loss:
            break
        best, best_loss = strength, loss
    return fit(best, np.full(len(targets), True), _features(measured))


def _features(data: MapSet) -> np.ndarray:
    """The first view of the images, averaged to at most SIDE x SIDE positions: fp32 (N, C s s)."""
    channels, height = data.maps.shape[2:4]
    side = min(SIDE, height, max(1, math.isqrt(MAX_FEATURES // channels)))
    parts = [F.adaptive_avg_pool2d(maps.float(), side).flatten(1).numpy() for maps in data.in_order(256)]
    return np.concatenate(parts)
