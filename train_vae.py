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
    card = {name: given.pop(name) for name in ("gpu", "vram_gib") if name in given}
    if given.pop("plan", False):
        for name in ("folds", "save_config"):
            if given.get(name) is not None:
                raise UsageError(f"--plan and --{name} exclude each other: remove one of them")
        from vae.training.plan_command import print_stage_plans

        print_stage_plans(given, **card)
        return 0
    for name, value in card.items():
        raise UsageError(f"--{name} {value} is only used by --plan: add --plan")
    folds = given.pop("folds", None)
    path = given.pop("save_config", None)
    if path:
        from vae.training.save_config import save_config

        save_config(given, path)
        return 0
    if folds:
        from vae.training.folds import train_folds

        return train_folds(given, folds)
    from vae.training.precheck import check_command

    checked = check_command(given)  # finds mistakes before PyTorch is imported, which takes seconds
    from vae.training.run import train_checked

    return train_checked(checked)


if __name__ == "__main__":
    import signal

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    from vae.system.script import run_script

    run_script("train_vae.py", main)
