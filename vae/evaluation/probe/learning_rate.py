"""The learning rate of a head, by a learning rate range test (`vae/lr_range.py`)."""

import copy

import torch
from torch import Tensor

from vae.evaluation.probe.heads import Schedule, loss_of, new_head, new_optimizer
from vae.lr_range import Curve, has_diverged, rising_rates, suggest

STEPS = 60
LOWEST = 1e-5  # heads are small and their inputs are standardized: lower rates change nothing


def find_learning_rate(
    head: str, features: Tensor, targets: Tensor, train: Tensor, num_classes: int, schedule: Schedule
) -> float:
    """The rate at which the loss of a new head on the images at `train` falls fastest."""
    rates, losses, unchanged = rising_rates(STEPS, LOWEST), [], []
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        model = new_head(head, features, train, num_classes).train()
        start, optimizer = copy.deepcopy(model), new_optimizer(model, LOWEST)
        steps_per_epoch = -(-len(train) // schedule.batch_size)
        epochs = [train[torch.randperm(len(train))] for _ in range(-(-STEPS // steps_per_epoch))]
        batches = [batch for epoch in epochs for batch in epoch.split(schedule.batch_size)]
        for step, (rate, chosen) in enumerate(zip(rates, batches, strict=False)):
            batch = features[chosen], targets[chosen]
            torch.manual_seed(step)  # both see the same dropout
            with torch.no_grad():
                before = loss_of(start, *batch, schedule).item()
            torch.manual_seed(step)
            loss = loss_of(model, *batch, schedule)
            if has_diverged(loss.item(), before):
                break
            losses.append(loss.item())
            unchanged.append(before)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return suggest(Curve(schedule.seed, rates[: len(losses)], losses, unchanged)).steepest
