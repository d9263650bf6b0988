"""Everything that the documentation names exists: flags, scripts, links, headings, files and metrics."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train_vae
from launchers.menu import MENU
from tests.harness.runs import ROOT
from tests.harness.toy_networks import TERM_WEIGHTS
from vae.config.flags import command_words
from vae.config.recipes import RECIPES
from vae.training.records.health import Gathered, ProcessNumbers
from vae.training.validation.slices import slice_record

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    # The log names benchmarks that are only in git's history now.
    "history": {
        "--center_px",
        "--dtypes",
        "--emulated_bf16",
        "--epochs",
        "--faults",
        "--heads",
        "--period",
        "--rows",
        "--size",
    },
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


@pytest.mark.parametrize("page", PAGES, ids=ids)
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


def test_table_of_profiles_lists_every_profile_for_cards():
    text = (ROOT / "docs" / "rtx5090.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| (\d?) ?\| (\d+) \| (\d+)[ ,].*\| (.+) \|$", text, re.M)
    numbers = {name: number for number, name in MENU.items()}
    assert rows == [
        (
            name,
            numbers.get(name, ""),
            str(one.values["image_size"]),
            str(one.values["batch_size"]),
            one.purpose,
        )
        for name, one in RECIPES.items()
        if not name.startswith("demo")
    ]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(tiny):
    """Uses a run with every loss term; metrics of a GPU, of shards and of several processes are added."""
    given = {
        **tiny,
        **{name: 1.0 for name in TERM_WEIGHTS},
        **{"perceptual_net": "random", "log_freq": 1},
        **{"adversarial_weight": 0.5, "disc_start": 1, "disc_channels": 8},
        "quick_val_steps": 2,
        "hourly_cost": 1.0,
    }
    assert train_vae.main(command_words(given)) == 0
    measured = {f"memory_{name}" for name in ("reserved_gib", "retries")}  # on a card only
    written = {"train/loss_scale", *(f"{kind}/{name}" for kind in ("train", "memory") for name in measured)}
    written |= {f"data/{name}" for name in ("open_shards", "cache_hit_rate", "remote_mib_per_second")}
    written |= {f"validation/{name}" for name in slice_record({"a": 1.0}) if name != "worst_slice"}
    two_processes = Gathered(1.0, [ProcessNumbers(*[1.0] * 16)] * 2)
    written |= {f"trainer/{name}" for name in two_processes.processes()}
    for line in Path(given["output_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        numbers = {name for name, value in record.items() if not isinstance(value, str)} - {"step"}
        written |= {f"{record['kind']}/{name}" for name in numbers}
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    kinds = "train|data|trainer|validation|quick_validation|baseline|memory"
    table = set(re.findall(rf"`((?:{kinds})/\w+(?:\.\d+)?)`", text))
    assert written == table
