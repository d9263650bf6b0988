"""Heads learn what is there, and nothing else: no leak from groups, the stopping fold or the random state."""

import numpy as np
import pytest
import torch

from vae.evaluation.probe.heads import HEADS, Schedule, predict, train_head
from vae.evaluation.probe.labels import Labels, assign_folds
from vae.evaluation.probe.run import Probed, _measure

QUICK = Schedule(epochs=12, batch_size=16)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_a_simple_rule(head):
    torch.manual_seed(0)
    targets = torch.arange(192) % 2
    features = 50 + torch.randn(192, 4, 8, 8)  # standardized within
    features[:, 1, 2:6, 2:6] += 3 * targets[:, None, None]
    parts = torch.arange(192).split(64)
    model, loss = train_head(head, features, targets, parts[0], parts[1], 2, QUICK)
    found = predict(model, features[parts[2]])
    assert (found.argmax(1) == targets[parts[2]]).float().mean() > 0.9
    assert loss < 0.5


def test_the_same_seed_gives_the_same_head_and_leaves_the_random_state():
    features, targets = (
        torch.randn(30, 2, 4, 4, generator=torch.Generator().manual_seed(1)),
        torch.arange(30) % 3,
    )
    state = torch.random.get_rng_state()
    train, stop = torch.arange(20), torch.arange(20, 30)
    found = [train_head("mlp", features, targets, train, stop, 3, QUICK) for _ in range(2)]
    assert torch.equal(state, torch.random.get_rng_state())
    assert found[0][1] == found[1][1]
    assert torch.equal(predict(found[0][0], features), predict(found[1][0], features))


def probed(groups):
    """Top-1 accuracy where labels are random by group, and images of one group look alike."""
    random = np.random.default_rng(0)
    truth = np.repeat(np.arange(40), 5)
    targets = random.permutation(np.arange(40) % 2)[truth]
    looks = torch.from_numpy(random.normal(size=(40, 8, 2, 2))[truth]).float()
    folds = assign_folds(targets, groups, 4)
    labels = Labels([str(n) for n in range(200)], ["a", "b"], targets, groups, folds, 4)
    one = Probed("latents", looks, ("mlp",))
    _measure(one, labels, Schedule(epochs=40), 3e-3, torch.device("cpu"))
    assert one.probabilities["mlp"].sum(1) == pytest.approx(np.ones(200), abs=1e-5)
    return one.scores["mlp"]["top1"]


def test_groups_prevent_leakage():
    assert probed(np.arange(200)) > 0.8  # images of a group on both sides: recognised, not understood
    assert probed(np.repeat(np.arange(40), 5)) < 0.7  # chance is 0.5, of 40 groups
