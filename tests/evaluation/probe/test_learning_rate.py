"""The rate of a head is found from the loss, with the same result each time, and trains a head."""

import pytest
import torch

from vae.evaluation.probe import learning_rate
from vae.evaluation.probe.heads import HEADS, Schedule, predict, train_head
from vae.evaluation.probe.learning_rate import LOWEST, find_learning_rate
from vae.lr_range import HIGHEST

QUICK = Schedule(epochs=12, batch_size=16)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_the_found_rate_learns_a_simple_rule(head):
    torch.manual_seed(0)
    targets = torch.arange(192) % 2
    features = 50 + torch.randn(192, 4, 8, 8)
    features[:, 1, 2:6, 2:6] += 3 * targets[:, None, None]
    train, stop, test = torch.arange(192).split(64)
    state = torch.random.get_rng_state()
    rate = find_learning_rate(head, features, targets, train, 2, QUICK)
    assert torch.equal(state, torch.random.get_rng_state())
    assert LOWEST < rate < HIGHEST
    assert rate == find_learning_rate(head, features, targets, train, 2, QUICK)
    changed = targets.clone()
    changed[64:] = 1 - changed[64:]
    assert rate == find_learning_rate(head, features, changed, train, 2, QUICK)  # only `train` is seen
    schedule = Schedule(epochs=12, batch_size=16, learning_rate=rate)
    model, _ = train_head(head, features, targets, train, stop, 2, schedule)
    assert (predict(model, features[test]).argmax(1) == targets[test]).float().mean() > 0.9


def test_every_head_and_a_few_images_give_a_rate(monkeypatch):
    monkeypatch.setattr(learning_rate, "STEPS", 12)
    features, targets = torch.randn(4, 2, 4, 4), torch.arange(4) % 2
    for head in HEADS:
        assert LOWEST <= find_learning_rate(head, features, targets, torch.arange(2), 2, QUICK) <= HIGHEST
