"""What the documentation names exists: flags, scripts, files, headings, and every scalar of a run."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train_vae
from tests.harness.runs import ROOT, as_flags
from vae.config.prepare_flags import CONFIG_OF

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--(?!no-`)[a-z][\w-]*")  # not the `--no-` of a sentence about all of them
# Flags of other people's programs that the pages name.
FOREIGN = {
    "nvidia-smi": {"--query-gpu", "--format"},
    "tensorboard": {"--logdir"},
    "torchrun": {"--nproc_per_node"},
    "wsl": {"--install"},
    "py": {"--version"},
    "bash": {"--create-dirs"},
}
LAUNCHERS = {
    "setup.sh": "launchers.environment",
    "setup_windows.bat": "launchers.environment",
    "train_rtx5090.sh": "launchers.training",
    "train_rtx5090.bat": "launchers.training",
}


def ids(path: Path) -> str:
    return path.name


@functools.cache
def flags_of(program: str) -> frozenset[str]:
    """Every flag in the help of a script, of a launcher, or of a module run by -m."""
    calls = [["--help"]]
    if program in LAUNCHERS:
        start = ["-m", LAUNCHERS[program]]
    elif program == "prepare_data.py":
        start, calls = [program], [["--mode", mode, "--help"] for mode in CONFIG_OF]
    else:
        start = ["-m", program] if not program.endswith(".py") else [program]
    found = {"--help"}
    for call in calls:
        done = subprocess.run(
            [sys.executable, *start, *call], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60
        )
        assert done.returncode == 0, f"{program} {call}: {done.stderr}"
        found |= set(FLAG.findall(done.stdout))
    if program.startswith("train_rtx5090"):
        found |= flags_of("train_vae.py")
    return frozenset(found | {flag.replace("--", "--no-", 1) for flag in found})


def scripts() -> list[str]:
    return sorted(path.name for path in ROOT.glob("*.py")) + sorted(LAUNCHERS)


def commands(page: Path) -> list[str]:
    """Lines of the fenced blocks, continued lines joined, remarks removed."""
    blocks = re.findall(r"^ *```(?:bash|bat)?\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s#.*", "", line).strip() for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_flag_on_a_page_exists(page):
    known = set().union(*(flags_of(script) for script in scripts()), *FOREIGN.values())
    for path in (ROOT / "benchmarks").glob("*.py"):
        known |= set(FLAG.findall(path.read_text(encoding="utf-8")))
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_on_a_page_names_a_script_that_takes_its_flags(page):
    for line in commands(page):
        found = re.match(r"(?:python (-m )?|torchrun .*?(?=\w+\.py)|\./|(?=\w+\.bat))([\w./]+)(.*)", line)
        if not found:  # another program, or a line of a table
            continue
        program = found[2]
        if found[1]:
            assert (ROOT / (program.replace(".", "/") + ".py")).exists(), line
            continue
        assert (ROOT / program).exists(), line
        if program in scripts() and "--test" not in line:  # what follows --test is pytest's
            assert set(FLAG.findall(found[3])) <= flags_of(program), line


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_to_a_file_leads_somewhere(page):
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
    references = set(re.findall(r"\]\[([^\]]+)\]", text))
    assert references <= set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))


@pytest.mark.slow
def test_every_scalar_that_a_run_writes_is_explained(tiny):
    """A real run with every term of the loss; what only a card writes is added."""
    given = {
        **tiny,
        **{"perceptual_weight": 1.0, "perceptual_net": "random", "log_freq": 1},
        **{"adversarial_weight": 0.5, "disc_start": 1, "disc_channels": 8},
    }
    assert train_vae.main(as_flags(given)) == 0
    written = {"train/loss_scale", "train/memory_reserved_gib", "memory/memory_reserved_gib"}
    for line in Path(given["output_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        numbers = {name for name, value in record.items() if not isinstance(value, str)} - {"step"}
        written |= {f"{record['kind']}/{name}" for name in numbers}
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`((?:train|validation|baseline|memory)/\w+)`", text))
    assert written == table
