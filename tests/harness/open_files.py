"""Files that a program has open: Windows does not remove them; elsewhere, this process is made to refuse."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def open_elsewhere(path: Path) -> Iterator[None]:
    """Within this context, `Path.unlink` cannot remove the file."""
    unlink = Path.unlink

    def refuse(self: Path, **options: Any) -> None:
        if os.name != "nt" and self == path:
            raise PermissionError(13, "The file is used by another process", str(path))
        unlink(self, **options)

    with open(path, "rb"), patch.object(Path, "unlink", refuse):
        yield
