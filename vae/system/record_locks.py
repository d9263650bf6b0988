"""Record locks on bytes of files: released when their process ends, and not inherited by forked processes.

That is why they are record locks (lockf), and not flock: a forked process shares flock's lock, and would hold
it after its parent was killed. The package filelock has no shared locks by name, of which the cache of shards
needs thousands in one file. A process that closes a file releases all its locks on it.
"""

import errno
import os

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # by another process
FAR = 2**30  # behind any text: Windows lets no other process read a locked byte

if os.name == "nt":
    import msvcrt

    def _lock(handle: int, offset: int, shared: bool) -> None:
        """Windows has no shared locks here."""
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

    def unlock_byte(handle: int, offset: int = FAR) -> None:
        """Release the lock of a byte; OSError if that fails."""
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]

else:
    import fcntl

    def _lock(handle: int, offset: int, shared: bool) -> None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.lockf(handle, kind | fcntl.LOCK_NB, 1, offset)

    def unlock_byte(handle: int, offset: int = FAR) -> None:
        """Release the lock of a byte; OSError if that fails."""
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, offset)


def lock_byte(handle: int, offset: int = FAR, *, shared: bool = False) -> bool:
    """Lock one byte unless another process holds it; OSError on a file system without locks."""
    try:
        _lock(handle, offset, shared)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True
