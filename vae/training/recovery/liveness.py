"""What every long part of a run owes to the outside: signs of life, and an answer to signals."""

from dataclasses import dataclass

from vae.training.recovery.signals import LOADING_SECONDS, StopSignals
from vae.training.recovery.watchdog import Watchdog


@dataclass(frozen=True)
class Liveness:
    """The watchdog and the signals of a run."""

    watchdog: Watchdog
    signals: StopSignals

    def beat(self) -> None:
        """Report progress."""
        self.watchdog.beat()

    def check(self, patience: float = LOADING_SECONDS) -> None:
        """End a wait with an exception, if the run hangs, or `patience` seconds after a signal to stop."""
        self.watchdog.check()
        self.signals.check_loading(patience)
