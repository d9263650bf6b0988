"""A search on several cards: one process of the same command for each."""

from collections.abc import Sequence

from vae.config.tune_flags import TuneConfig
from vae.system import console
from vae.system.errors import UserError
from vae.training.child_runs import ChildRuns


def search_on_cards(config: TuneConfig, argv: Sequence[str]) -> None:
    """Start a process per card, and wait for all of them; UserError if one fails."""
    assert config.cards
    failed: list[int] = []
    with ChildRuns[int]() as processes:
        for card in config.cards:  # the last --cards of a command counts
            processes.start(card, "tune_vae.py", [*argv, "--cards", str(card)])
        console.info(f"cards   {', '.join(map(str, config.cards))}: one process each")
        while processes.running:
            failed += [card for card, code in processes.ended() if code]
    if failed:
        raise UserError(f"--cards {failed[0]}: its process has failed, see above; the same command continues")
