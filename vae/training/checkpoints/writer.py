"""Saving without waiting: a thread writes a copy of the state while training goes on."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vae.config.options import Config
from vae.device import is_out_of_memory
from vae.interop.checkpoint_file import save_checkpoint
from vae.memory.available import available_bytes
from vae.memory.plan import checkpoint_bytes
from vae.system import console
from vae.system.host import GIB


def copy_fits(config: Config, device: torch.device) -> bool:
    """Whether main memory has room for the copy; on a CPU, the plan of the step includes it."""
    needed = checkpoint_bytes(config)
    available = available_bytes(torch.device("cpu"))
    if device.type == "cpu" or needed <= available:
        return True
    console.info(
        f"--background_save needs {needed / GIB:.1f} GiB of main memory, but only {available / GIB:.1f} GiB "
        "may be used: saves make training wait"
    )
    return False


class HostCopy:
    """Copies nested data with its tensors into host memory; the next copy uses the same memory again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """The copy, complete when this returns; the previous one is overwritten."""
        copied = self._copy(value, ())
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, value: Any, where: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._buffer(value.detach(), where).copy_(value.detach(), non_blocking=True)
        if isinstance(value, dict):
            return type(value)((key, self._copy(part, (*where, key))) for key, part in value.items())
        if isinstance(value, list | tuple):
            return type(value)(self._copy(part, (*where, index)) for index, part in enumerate(value))
        return value

    def _buffer(self, value: torch.Tensor, where: tuple[Any, ...]) -> torch.Tensor:
        """Memory of the tensor's shape and layout; pinned if a GPU copies into it, which is faster."""
        form = (value.shape, value.stride(), value.dtype)
        found = self._buffers.get(where)
        if found is None or (found.shape, found.stride(), found.dtype) != form:
            found = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._buffers[where] = found
        return found


class CheckpointWriter:
    """Writes the checkpoints of a run, at most one at a time. The main process uses it, between steps."""

    def __init__(self, background: bool) -> None:
        """With `background`, a save only copies the state; without, it also waits for the file."""
        self._background = background
        self._host_copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None  # why the last checkpoint is not on disk
        self._messages: list[Callable[[], None]] = []  # what the next `report` prints

    def save(self, path: Path, content: dict[str, Any], prune: Callable[[], object]) -> None:
        """Save a checkpoint, then `prune`; waits for the previous one. `report` prints a failure."""
        self.finish()
        if self._background and (copy := self._copied(content)) is not None:
            thread = threading.Thread(target=self._write_in_thread, args=(path, copy, prune), daemon=True)
            thread.start()
            self._thread = thread
            return
        self._write(path, content, prune)
        self.report()

    def finish(self) -> str | None:
        """Wait for the file under way; returns why the last checkpoint is not on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.report()
        return self._failure

    def report(self) -> None:
        """Print what has happened since the last call."""
        while self._messages:
            self._messages.pop(0)()

    def _copied(self, content: dict[str, Any]) -> Any:
        """The content in host memory; None, reported once, if there is too little of it."""
        try:
            return self._host_copy.of(content)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not is_out_of_memory(error):
                raise
        console.info("--background_save: no memory for a copy of the weights: saves make training wait")
        self._background = False
        return None

    def _write_in_thread(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except Exception as error:  # a bug: `report` raises it where it ends the run
            self._failure = str(error)
            self._messages.append(partial(_raise, error))

    def _write(self, path: Path, content: dict[str, Any], prune: Callable[[], object]) -> None:
        self._failure = None
        try:
            save_checkpoint(path, content)
        except OSError as error:
            self._failure = str(error)
            text = f"{path} is not saved: {error}; older checkpoints are unchanged, the next save tries again"
            self._notify(console.warning, text)
            return
        try:
            prune()
        except OSError as error:
            self._notify(console.warning, f"older checkpoints cannot be removed: {error}")

    def _notify(self, print_line: Callable[[str], None], text: str) -> None:
        self._messages.append(partial(print_line, text))


def _raise(error: Exception) -> None:
    raise error
