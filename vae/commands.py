"""The commands: the `main` of each script, which `pip install` also makes a program such as `vae-train`.

What a command needs is imported when it runs, PyTorch last: it takes seconds, and mistakes are found before.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vae.config.check_flags import CheckConfig


def run(name: str) -> NoReturn:
    """Run a command as a program: its words are those of the command line."""
    import _signal  # signal would first import enum

    if "IPython" not in sys.modules and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    from vae.system import console
    from vae.system.script import run_script

    programs = {script: f"vae-{command}" for command, (script, _, _) in _COMMANDS.items()}
    if os.path.splitext(os.path.basename(sys.argv[0]))[0] in programs.values():
        console.print_programs(programs)
    script, main, stopped = _COMMANDS[name]
    if name == "prepare" and _continues(sys.argv[1:]):
        stopped = "stopped: the same command continues from here"
    run_script(script, main, stopped)


def train(argv: list[str]) -> int:
    """Parse the flags, and train or do what a flag asks for instead; returns the exit code."""
    from vae.config.flags import parse_flags
    from vae.config.recipes import profile_table
    from vae.system import console
    from vae.system.errors import UsageError

    given = parse_flags(argv)
    if given.pop("list_profiles", False):
        console.info(profile_table())
        return 0
    plan = given.pop("plan", False)
    path = given.pop("save_config", None)
    card = {name: given.pop(name) for name in ("gpu", "vram_gib") if name in given}
    if plan and path is not None:
        raise UsageError("--plan and --save_config exclude each other: remove one of them")
    for name, value in card.items():
        if not plan:
            raise UsageError(f"--{name} {value} is only used by --plan: add --plan")
    from vae.training.early_checks import Command, check_command

    if plan:
        from vae.training.dry_run import print_stage_plans

        print_stage_plans(Command.of(given), **card)
        return 0
    if path:
        from vae.training.dry_run import save_config

        save_config(Command.of(given), path)
        return 0
    command = check_command(given)  # before PyTorch is imported
    if command.value("find_lr"):
        from vae.training.find_lr import find_lr

        return find_lr(command)
    from vae.training.run import train_checked

    return train_checked(command)


def prepare(argv: list[str]) -> int:
    """Prepare data in the mode that the flags name; returns the exit code."""
    from vae.config.prepare_flags import (
        AnalyzeConfig,
        IndexConfig,
        PreprocessConfig,
        ShardConfig,
        SplitConfig,
        ValidateConfig,
        parse_prepare_flags,
    )

    config = parse_prepare_flags(argv)
    if isinstance(config, PreprocessConfig):
        from vae.prepare.preprocess import run_preprocess

        return run_preprocess(config)
    if isinstance(config, ValidateConfig):
        from vae.prepare.validate import run_validate

        return run_validate(config)
    if isinstance(config, ShardConfig):
        from vae.prepare.shard import run_shard

        return run_shard(config)
    if isinstance(config, IndexConfig):
        from vae.prepare.index import run_index

        return run_index(config)
    if isinstance(config, AnalyzeConfig):
        from vae.prepare.analyze import run_analyze

        return run_analyze(config)
    if isinstance(config, SplitConfig):
        from vae.prepare.split import run_split

        return run_split(config)
    from vae.prepare.demo import run_demo

    return run_demo(config)


def _continues(argv: list[str]) -> bool:
    """Whether a stopped command of prepare_data.py has kept what it has done."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    mode = words[words.index("--mode") + 1 :][:1] if "--mode" in words else []
    return mode in (["preprocess"], ["shard"], ["index"], ["analyze"], ["demo"]) or "--rows_dir" in words


def evaluate(argv: list[str]) -> int:
    """Parse the flags and run the comparison; returns the exit code."""
    from vae.config.trained_vae_flags import parse_evaluate_flags

    config = parse_evaluate_flags(argv)
    from vae.evaluation.early_checks import check_command
    from vae.prepare.hub_dataset import with_local_data

    check_command(config)  # before PyTorch is imported
    config = with_local_data(config)
    from vae.evaluation.compare import compare

    compare(config)
    return 0


def infer(argv: list[str]) -> int:
    """Parse the flags and run the command; returns the exit code."""
    from vae.config.trained_vae_flags import parse_infer_flags

    config = parse_infer_flags(argv)
    from vae.inference.tasks import plan_tasks

    tasks = plan_tasks(config)  # before PyTorch is imported
    from vae.inference.infer import infer

    return infer(config, tasks)


def export(argv: list[str]) -> int:
    """Export as the flags in `argv` specify; returns the exit code."""
    from vae.config.trained_vae_flags import parse_export_flags

    config = parse_export_flags(argv)
    from vae.interop.early_checks import check_command

    check_command(config)  # before PyTorch is imported
    from vae.interop.exporting import export

    export(config)
    return 0


def _run_checks(config: "CheckConfig") -> int:
    """Gather facts, judge them, print the report; returns the exit code."""
    from vae.checks.machine import gather
    from vae.checks.report import as_json, as_text, exit_code
    from vae.checks.table import judge
    from vae.system import console
    from vae.system.script import ROOT

    if console.is_terminal(sys.stdout) and not config.json:
        console.progress("Checking this machine ...")
    facts = gather(ROOT, config.output_dir, config.data_path)
    checks = judge(facts)
    code = exit_code(checks, config.strict)
    console.info(as_json(facts, checks, code) if config.json else as_text(checks))
    return code


def _run_plan(config: "CheckConfig") -> int:
    """Print the profiles that fit; returns the exit code."""
    import json

    from vae.system import console
    from vae.system.gpus import find_cards

    if config.gpu is not None:
        find_cards(config.gpu)  # finds a mistake before PyTorch is imported, which takes seconds
    from vae.memory.plan_table import plan_data, print_plan

    if config.json:
        console.info(json.dumps(plan_data(config.gpu, config.vram_gib), indent=2))
    else:
        print_plan(config.gpu, config.vram_gib)
    return 0


def check(argv: list[str]) -> int:
    """Check this machine; returns the exit code."""
    from vae.config.check_flags import parse_check_flags

    config = parse_check_flags(argv)
    return _run_plan(config) if config.plan else _run_checks(config)


def tune(argv: list[str]) -> int:
    """Parse the flags and search; returns the exit code."""
    from importlib.util import find_spec

    from vae.config.tune_flags import parse_tune_flags
    from vae.system.errors import UserError

    config = parse_tune_flags(argv)
    if find_spec("optuna") is None:
        raise UserError("tune_vae.py needs optuna: run pip install -r requirements-tune.txt")
    from vae.tuning.search import check_command, search

    search(config, check_command(config))
    return 0


# The script, its function, and what is printed if a signal stops it.
_COMMANDS: dict[str, tuple[str, Callable[[list[str]], int], str]] = {
    "train": ("train_vae.py", train, "stopped"),
    "prepare": ("prepare_data.py", prepare, "stopped"),
    "evaluate": ("evaluate_vae.py", evaluate, "stopped: no results"),
    "infer": ("infer_vae.py", infer, "stopped: finished files are complete, the current one is missing"),
    "export": ("export_vae.py", export, "stopped: nothing was written"),
    "check": ("check_compatibility.py", check, "stopped"),
    "tune": ("tune_vae.py", tune, "stopped: the same command continues the search"),
}
# The programs of pyproject.toml.
vae_train, vae_prepare, vae_evaluate, vae_infer, vae_export, vae_check, vae_tune = (
    partial(run, name) for name in _COMMANDS
)
