"""Signals that pytest inherits as ignored, for example SIGINT in the background of a shell."""

import signal


def handle_ignored_signals() -> None:
    """Let child processes of the tests start with the default handlers of SIGINT and SIGHUP.

    An ignored signal stays ignored in a child process, but a handled one gets its default handler back. The
    handlers do nothing, so pytest itself still ignores these signals.
    """
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
