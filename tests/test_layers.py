"""Layers: a package imports only from layers below its own, and the lowest only from Python."""

import ast
import re
import subprocess
import sys

import pytest

from tests.harness.blocked_imports import without_libraries
from tests.harness.runs import ROOT


def read_layers() -> list[set[str]]:
    """The layers of docs/architecture.md, lowest first; packages of one layer do not know each other."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| layer, from high to low \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    rows = [set(re.findall(r"`(\w+)`", row.split(" | ")[0])) for row in table.splitlines()]
    assert rows[0] == set()  # scripts, launchers
    return rows[:0:-1]


LAYERS = read_layers()
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
FILES = sorted((ROOT / "vae").rglob("*.py"))
STDLIB_PACKAGES = ("config", "system")


def package_of(path) -> str:
    """The package or module of vae/ that a file belongs to; '' for vae/__init__.py."""
    first = path.relative_to(ROOT / "vae").parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


STDLIB_ONLY = [p for p in FILES if package_of(p) in STDLIB_PACKAGES]


def imports_of(path, top_level_only: bool = False) -> list[str]:
    """Full dotted names of the modules and names that a file imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if top_level_only and getattr(node, "col_offset", 0):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_packages_import_only_from_lower_layers():
    for path in FILES:
        package = package_of(path)
        assert package in LAYER_OF or package == "", f"{package} is in no row of docs/architecture.md"
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "vae" or parts[1] == package:
                continue
            if not package:  # vae/__init__.py re-exports the API on first use
                assert parts[1] == "api", f"{path} imports {name}"
                continue
            assert LAYER_OF[parts[1]] < LAYER_OF[package], f"{path} imports {name}"


def test_config_and_system_need_only_the_standard_library():
    for path in STDLIB_ONLY:
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            ours = top == "vae" and rest.split(".")[0] in STDLIB_PACKAGES
            assert ours or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_the_package_imports_no_script_and_no_launcher():
    scripts = {path.stem for path in ROOT.glob("*.py")} | {"launchers", "tests"}
    for path in FILES:
        for name in imports_of(path):
            assert name.split(".")[0] not in scripts, f"{path} imports {name}"


def test_scripts_define_little_and_import_no_library():
    for path in ROOT.glob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "vae", f"{path} imports {name}"
        for name in imports_of(path, top_level_only=True):
            allowed = name.startswith("vae.commands.")
            assert allowed or not name.startswith("vae"), f"{path} imports {name} before --help could answer"


@pytest.mark.parametrize(("flag", "word"), [("--help", "--image_size"), ("--list_profiles", "maximum")])
def test_the_trainer_answers_without_pytorch(flag, word):
    found = without_libraries("train_vae.py", flag)
    assert found.returncode == 0, found.stderr
    assert "batch" in found.stdout
    assert word in found.stdout


def test_importing_vae_imports_no_library(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys, vae\n"
        "assert {'load_vae', 'encode', 'train'} <= set(dir(vae))\n"
        "assert [name for name in sys.modules if name.startswith('vae.')] == []\n"
        "try:\n"
        "    vae.not_a_name\n"
        "except AttributeError as error:\n"
        "    assert 'not_a_name' in str(error)\n"
    )
    found = without_libraries(str(script))
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_importing_does_nothing(tmp_path):
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in FILES if p.name != "__init__.py"]
    script = "\n".join(
        [
            "import sys, threading, logging, os, torch",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "random, threads = torch.random.get_rng_state(), torch.get_num_threads()",
            *(f"import {name}" for name in modules),
            "assert torch.equal(random, torch.random.get_rng_state()), 'random numbers were drawn'",
            "assert torch.get_num_threads() == threads",
            "assert threading.active_count() == 1, 'a thread was started'",
            "assert not logging.getLogger().handlers, 'logging was set up'",
            "assert not torch.cuda.is_initialized()",
            "assert os.listdir('.') == [], 'a file was made'",
        ]
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
