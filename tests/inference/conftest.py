"""A VAE folder, and commands of infer_vae.py that run in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.small_vae import write_vae
from vae.config.trained_vae_flags import parse_infer_flags
from vae.inference.infer import infer
from vae.inference.tasks import plan_tasks


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory) -> Path:
    return write_vae(tmp_path_factory.mktemp("vae") / "vae")


@pytest.fixture
def command(vae_folder, tmp_path) -> Callable[..., int]:
    """Run infer_vae.py with --mode and other words; --vae defaults to `vae_folder`."""

    def run(mode: str, *words: object) -> int:
        argv = ["--mode", mode, "--device", "cpu", *map(str, words)]
        if "--vae" not in argv:
            argv += ["--vae", str(vae_folder)]
        if "--output_dir" not in argv:
            argv += ["--output_dir", str(tmp_path / "out")]
        config = parse_infer_flags(argv)
        return infer(config, plan_tasks(config))

    return run
