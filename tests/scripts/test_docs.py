"""Everything that the documentation names exists: flags, scripts, links, headings, files and metrics."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/recipes/README.md"]
FLAG = re.compile(r"(?<![\w-])--(?!no-`)[a-z][\w-]*")  # not `--no-` alone
# Flags of other programs that the pages name.
FOREIGN = {
    "nvidia-smi": {"--query-gpu", "--format"},
    "tensorboard": {"--logdir"},
    "torchrun": {"--nproc_per_node", "--max_restarts", "--nnodes"}
    | {"--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf"},
    "sbatch": {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node"}
    | {"--requeue", "--open-mode", "--array", "--parsable", "--dependency", "--wrap"},
    "ray": {"--head", "--port", "--address"},
    "wsl": {"--install"},
    "py": {"--version"},
    "bash": {"--create-dirs"},
    "uv": {"--output-file"},
}
LAUNCHERS = {
    "setup.sh": "launchers.environment",
    "setup_windows.bat": "launchers.environment",
    "train_rtx5090.sh": "launchers.training",
    "train_rtx5090.bat": "launchers.training",
}


def ids(path: Path) -> str:
    return path.name


def help_text(start: list[str], flag: str) -> str:
    command = [sys.executable, *start, flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@functools.cache
def flags_of(program: str) -> frozenset[str]:
    """Every flag in the help of a script, of a launcher, or of a module that runs with -m."""
    if program in LAUNCHERS:
        start = ["-m", LAUNCHERS[program]]
    else:
        start = ["-m", program] if not program.endswith(".py") else [program]
    text = help_text(start, "--help")
    if "--help_all" in text:
        text = help_text(start, "--help_all")
    found = {"--help", "--help_all", *FLAG.findall(text.replace("--[no-]", "--"))}
    if program.startswith("train_rtx5090"):
        found |= flags_of("train_vae.py")
    return frozenset(found | {flag.replace("--", "--no-", 1) for flag in found})


def scripts() -> list[str]:
    return sorted(path.name for path in ROOT.glob("*.py")) + sorted(LAUNCHERS)


def commands(page: Path) -> list[str]:
    """The lines of all code blocks, with continued lines joined and comments removed."""
    blocks = re.findall(r"^ *```(?:bash|bat)?\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s#.*", "", line).strip() for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_flags_on_a_page_exist(page):
    known = set().union(*(flags_of(script) for script in scripts()), *FOREIGN.values())
    for path in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")):
        known |= set(FLAG.findall(path.read_text(encoding="utf-8")))
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_on_a_page_use_existing_scripts_and_flags(page):
    for line in commands(page):
        found = re.match(r"(?:python (-m )?|torchrun .*?(?=\w+\.py)|\./|(?=\w+\.bat))([\w./]+)(.*)", line)
        if not found:  # another program, or a table row
            continue
        program = found[2]
        if found[1]:
            assert (ROOT / (program.replace(".", "/") + ".py")).exists(), line
            continue
        assert (ROOT / program).exists(), line
        if program in scripts() and "--test" not in line:  # what follows --test is pytest's
            assert set(FLAG.findall(found[3])) <= flags_of(program), line


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "benchmarks").glob("*.md")], ids=ids)
def test_relative_links_and_headings_exist(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if "://" in link:
            continue
        target, _, heading = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, link
    for image in re.findall(r'<img[^>]* src="([^"]+)"', text):
        assert (page.parent / image).exists(), image
    references = set(re.findall(r"\]\[([^\]]+)\]", text))
    assert references <= set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))


def test_index_links_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((\w+\.md)\)", index)
    assert sorted(linked) == sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md")


def test_every_file_begins_with_what_it_contains():
    """docs/architecture.md prints these lines instead of listing the files."""
    files = [path for path in (ROOT / "vae").rglob("*.py") if path.read_text(encoding="utf-8")]
    without = [path for path in files if not path.read_text(encoding="utf-8").startswith('"""')]
    assert files
    assert without == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800
