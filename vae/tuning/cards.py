"""A search on several cards: one process of the same command for each."""

import subprocess
import sys
import time
from collections.abc import Sequence

from vae.config.tune_flags import TuneConfig
from vae.system import child_process, console
from vae.system.errors import UserError
from vae.system.script import ROOT

POLL_SECONDS = 0.5


def search_on_cards(config: TuneConfig, argv: Sequence[str]) -> None:
    """Start a process per card, and wait for all of them; UserError if one fails."""
    assert config.cards
    script = [sys.executable, str(ROOT / "tune_vae.py")]
    processes = {  # the last --cards of a command counts
        card: child_process.start([*script, *argv, "--cards", str(card)], stdin=subprocess.DEVNULL)
        for card in config.cards
    }
    console.info(f"cards   {', '.join(map(str, config.cards))}: one process each")
    try:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            process.wait()
    failed = [card for card, process in processes.items() if process.returncode]
    if failed:
        raise UserError(f"--cards {failed[0]}: its process has failed, see above; the same command continues")
