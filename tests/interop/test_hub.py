"""Downloads from the Hugging Face hub, against a stand-in for its server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hub_datasets import DatasetHub, dataset_hub
from tests.harness.runs import run_here
from tests.harness.small_vae import write_vae
from vae.interop import hub
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[DatasetHub]:
    """A hub with one repository, someone/pipeline, that contains a VAE in vae/."""
    write_vae(tmp_path / "hub/main/someone/pipeline/vae", seed=1)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hub.download.cache_clear()
    with dataset_hub(tmp_path / "hub", monkeypatch) as server:
        yield server
    hub.download.cache_clear()


def test_pipeline_subfolder_and_file_of_a_repository_are_the_same_vae(server):
    repo = server.root / "main/someone/pipeline"
    expected = load_vae(repo / "vae")
    assert (
        run_here("export_vae.py", "--vae", repo / "vae", "--output", repo / "one.safetensors").returncode == 0
    )
    for name in ("someone/pipeline", "someone/pipeline:vae", "someone/pipeline:one.safetensors"):
        loaded = load_vae(Path(name))
        for key, value in expected.autoencoder.state_dict().items():
            assert value.equal(loaded.autoencoder.state_dict()[key]), (name, key)
    assert load_vae(Path("someone/pipeline:vae")).scaling_factor == 0.5


def test_folder_on_this_machine_wins_and_the_hub_is_not_asked(server, tmp_path):
    own = load_vae(write_vae(tmp_path / "someone" / "pipeline", seed=2)).autoencoder.state_dict()
    loaded = load_vae(Path("someone/pipeline")).autoencoder.state_dict()
    assert all(value.equal(loaded[key]) for key, value in own.items())
    with pytest.raises(UserError, match=r"--vae someone.pipelin: there is no such file or folder$"):
        load_vae(Path("someone/pipelin"))
    assert server.requests == []


@pytest.mark.parametrize(
    ("refused", "name", "part"),
    [
        (None, "someone/nothing", "no such public repository"),
        (None, "someone/pipeline:unet", "unet/diffusion_pytorch_model.safetensors"),
        (None, "someone/pipeline:x.safetensors", "no such file"),
        ((401, "GatedRepo"), "someone/pipeline", "gated"),
        ((403, ""), "someone/pipeline", "403"),
        ((404, "RevisionNotFound"), "someone/pipeline", "revision"),
    ],
)
def test_refusals_are_one_line(server, refused, name, part):
    if refused:
        server.refused["someone/pipeline"] = refused
    with pytest.raises(UserError, match=f"^--init_from {name}: .*{part}") as error:
        load_vae(Path(name), flag="--init_from")
    assert "\n" not in str(error.value)


def test_offline_uses_the_cache_and_says_what_it_lacks(server, monkeypatch):
    load_vae(Path("someone/pipeline"))
    hub.download.cache_clear()
    asked = len(server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_vae(Path("someone/pipeline")).scaling_factor == 0.5
    with pytest.raises(UserError, match=r"--vae someone/other: .* unset HF_HUB_OFFLINE"):
        load_vae(Path("someone/other"))
    assert len(server.requests) == asked


def test_without_the_package_the_message_names_the_download(server, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match="hf download someone/pipeline"):
        load_vae(Path("someone/pipeline"))
