#!/usr/bin/env python3
"""Train a high-resolution image VAE on a folder of images: `python train_vae.py --help`."""


def main(argv: list[str]) -> int:
    """Parse the flags and train; returns the exit code."""
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
    from vae.training.command import Command, check_command

    if plan:
        from vae.training.actions import print_stage_plans

        print_stage_plans(Command.of(given), **card)
        return 0
    if path:
        from vae.training.actions import save_config

        save_config(Command.of(given), path)
        return 0
    command = check_command(given)  # finds mistakes before PyTorch is imported, which takes seconds
    if command.value("find_lr"):
        from vae.training.find_lr import find_lr

        return find_lr(command)
    from vae.training.run import train_checked

    return train_checked(command)


if __name__ == "__main__":
    import _signal  # signal would first import enum
    import os
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no traceback of an import
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    from vae.system.script import run_script

    run_script("train_vae.py", main)
