"""Files are opened by the functions of vae/system/files.py alone: regular ones, and never through a link."""

import ast
from pathlib import Path

import pytest

from tests.harness.runs import ROOT

OPENING = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "touch", "mkstemp", "hardlink_to"}
OPENING |= {"copy2", "copyfile", "NamedTemporaryFile", "symlink_to"}
# Calls of libraries that open a path: their first argument is `regular_path(...)`, or an open file.
BY_PATH = {"safe_open", "load_file", "torch.load", "np.load", "Image.open", "zipfile.ZipFile", "tarfile.open"}
OPENED = {"regular_path", "open_regular", "BytesIO"}
# What a file may open itself, and why.
ALLOWED = {
    "vae/system/files.py": {"os.open", "open"},  # the functions
    "vae/system/console.py": {"os.open"},  # the null device
    "vae/system/script.py": {"open"},  # the null device
    "vae/data/decoding_processes.py": {"os.open"},  # the null device
    "vae/html.py": {".read_text"},  # of the package
    "vae/prepare/database.py": {".read_text"},  # of the package
    "vae/prepare/pool.py": {"open"},  # the null device, and the memory of this process
    "vae/shards/remote_shards.py": {".touch"},  # of the cache
    "vae/shards/shard_cache.py": {".touch", ".write_bytes"},  # in the folder of the cache, by its own rules
    "vae/shards/store.py": {"open", ".read_bytes"},  # the same, and a temporary folder
}


def name_of(call: ast.Call) -> str:
    """module.function for a name, .method for anything else."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        return f"{owner.id if isinstance(owner, ast.Name) else ''}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def opened_files(tree: ast.AST) -> set[str]:
    """The calls that open a file by its path."""
    found = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = name_of(call)
        last = name.rpartition(".")[2]
        if name in BY_PATH:
            first = call.args[0] if call.args else next(word.value for word in call.keywords)
            is_checked = isinstance(first, ast.Call) and name_of(first).rpartition(".")[2] in OPENED
            if not is_checked and not (isinstance(first, ast.Name) and first.id == "file"):
                found.add(name)
        elif name in ("open", "os.truncate") or (last in OPENING and "." in name):
            found.add(name if name in ("open", "os.open") else f".{last}")
    return found


FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "vae").rglob("*.py"))]


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_opened_elsewhere(name):
    found = opened_files(ast.parse(Path(ROOT, name).read_text(encoding="utf-8")))
    assert found == ALLOWED.get(name, set())


def test_openings_are_found():
    code = "path.open('w'); open('x'); os.open('x', 0); np.load(path); np.load(regular_path(p)); a.b.touch()"
    assert opened_files(ast.parse(code)) == {".open", "open", "os.open", "np.load", ".touch"}
