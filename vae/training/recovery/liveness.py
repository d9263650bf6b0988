"""What every long part of a run owes to the outside: signs of life, and an answer to signals."""

from dataclasses import dataclass

from vae.training.recovery.signals import StopSignals
from vae.training.recovery.watchdog import Watchdog


@dataclass(frozen=True)
class Liveness:
    """The watchdog and the signals of a run."""

    watchdog: Watchdog
    signals: StopSignals

    def beat(self) -> None:
        """Report progress."""
        self.watchdog.beat()

    def check(self) -> None:
        """End a wait for images with an exception, if the run hangs or a signal has asked to stop."""
        self.watchdog.check()
        self.signals.check_loading()
