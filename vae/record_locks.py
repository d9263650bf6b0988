"""Record locks on bytes of files: released when their process ends, and not inherited by forked processes.

That is why they are record locks (lockf), and not flock: a forked process shares flock's lock, and would hold
it after its parent was killed. A process that closes a file releases all its locks on it.
"""

import errno
import os

HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # the OSError of lock_byte then
FAR = 2**30  # behind any text: Windows lets no other process read a locked byte

if os.name == "nt":
    import msvcrt

    def lock_byte(handle: int, offset: int = FAR, *, shared: bool = False) -> None:
        """Lock one byte without waiting; OSError if that fails. Windows has no shared locks here."""
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

    def unlock_byte(handle: int, offset: int = FAR) -> None:
        """Release the lock of a byte; OSError if that fails."""
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]

else:
    import fcntl

    def lock_byte(handle: int, offset: int = FAR, *, shared: bool = False) -> None:
        """Lock one byte without waiting; OSError if that fails."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.lockf(handle, kind | fcntl.LOCK_NB, 1, offset)

    def unlock_byte(handle: int, offset: int = FAR) -> None:
        """Release the lock of a byte; OSError if that fails."""
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, offset)
