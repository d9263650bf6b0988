"""How a launcher ends: its exit codes, and what it does when nobody reads its output any more."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports of a program that died of it


@contextmanager
def flushed_output() -> "Iterator[None]":  # quoted: check_compatibility.py is read by Python 3.6 as well
    """Ends the process without a message where the reader of its output has left, as under `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail once more when Python flushes it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
