"""A checkpoint file is complete or reported as damaged, whatever happens to it or to the writing process."""

import hashlib
import os
import random
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.harness.checkpoints import WITH_DISCRIMINATOR, checkpoint
from tests.harness.damaged_files import flip_bit
from tests.harness.training_runs import assert_same
from vae.interop.checkpoint_file import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_KEYS,
    DamagedCheckpointError,
    check_sums,
    load_checkpoint,
    read_torch_file,
    record_path,
    save_checkpoint,
    verify_checkpoint,
)
from vae.system.errors import UserError
from vae.system.files import sha256_of_file
from vae.training.provenance import Identity
from vae.training.stages import Position, Stage
from vae.training.validation import History

FILLED = torch.arange(200_000, dtype=torch.float32)


def content(step: int = 1) -> dict:
    """A complete checkpoint, with a large tensor in addition."""
    return {**checkpoint(step), "filled": FILLED + step}


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "checkpoint_epoch_1.pt"
    save_checkpoint(path, content())
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_and_load_round_trip(saved):
    loaded = load_checkpoint(saved)
    assert_same({key: loaded[key] for key in content()}, content(), "content")
    assert names(saved.parent) == ["checkpoint_epoch_1.pt", "checkpoint_epoch_1.pt.sha256"]
    digest = hashlib.sha256(saved.read_bytes()).hexdigest()
    assert sha256_of_file(saved) == digest
    assert record_path(saved).read_text() == f"{digest}  checkpoint_epoch_1.pt\n"  # as of sha256sum
    record_path(saved).unlink()
    assert load_checkpoint(saved)["position"]["step"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc for the names of open files")
def test_order_of_system_calls(tmp_path, monkeypatch):
    """Both files are flushed before they are renamed; the folder is flushed last."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(handle):
        calls.append("flush " + os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def recorded_replace(source, target):
        calls.append(f"rename {os.path.basename(source)} to {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save_checkpoint(tmp_path / "c.pt", content())
    assert calls == [
        "flush c.pt",
        "flush c.pt.sha256",
        "rename c.pt to c.pt",
        "rename c.pt.sha256 to c.pt.sha256",
        f"flush {tmp_path.name}",
    ]


@pytest.mark.parametrize("limit", [0, 300_000], ids=["nothing", "most"])
def test_full_disk_leaves_old_file_and_no_temporary_file(saved, limit):
    """A limit on file size simulates the full disk."""
    before = saved.read_bytes()
    resource = pytest.importorskip("resource")  # Windows has no such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"checkpoint_epoch_1|File too large"):
            save_checkpoint(saved, content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved.read_bytes() == before
    assert load_checkpoint(saved)["position"]["step"] == 1
    assert [name for name in names(saved.parent) if "scratch" in name] == []


def test_flipped_bit_is_reported_as_damage(saved):
    for share in (0, 0.5, 1):
        position = round(share * (saved.stat().st_size - 1))
        flip_bit(saved, position, bit=3)
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint_epoch_1\.pt is damaged: its SHA-256"):
            load_checkpoint(saved)
        flip_bit(saved, position, bit=3)


@pytest.mark.parametrize("record", [True, False], ids=["with_record", "without_record"])
def test_truncated_file_is_reported_as_damage(saved, record):
    size = saved.stat().st_size
    if not record:
        record_path(saved).unlink()
    for share in (0.9999, 0.5, 0):
        os.truncate(saved, int(share * size))
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint_epoch_1\.pt is damaged"):
            load_checkpoint(saved)


def test_wrong_sha256_is_reported_as_damage(saved):
    for text in (b"", b"0" * 64 + b"  checkpoint_epoch_1.pt\n", b"\xff\x00"):
        record_path(saved).write_bytes(text)
        with pytest.raises(DamagedCheckpointError, match="SHA-256 is not the one in"):
            load_checkpoint(saved)


@pytest.mark.skipif(os.name == "nt", reason="an error of PyTorch's reader may crash Wine")
def test_flipped_bit_without_sha256_never_changes_loaded_content(tmp_path):
    """The archive's own checksums detect the bit, or it is in bytes that are not read."""
    saved = tmp_path / "checkpoint_epoch_1.pt"
    expected = {"format": CHECKPOINT_FORMAT, "position": {"step": 1}, "filled": FILLED}
    save_checkpoint(saved, expected)
    record_path(saved).unlink()
    good = saved.read_bytes()
    rng = random.Random(0)
    ends = [rng.choice([*range(600), *range(len(good) - 1200, len(good))]) for _ in range(30)]
    errors = []
    for number, position in enumerate([*ends, *rng.sample(range(len(good)), 10)]):
        saved = tmp_path / f"checkpoint_epoch_{number}.pt"  # Windows does not replace a mapped file
        saved.write_bytes(good)
        flip_bit(saved, position, rng.randrange(8))
        try:
            verify_checkpoint(saved)
            loaded = read_torch_file(saved)
            check_sums(saved)
        except (UserError, ValueError) as error:
            errors.append(str(error))
        else:
            assert_same(loaded, expected, "content")
    assert len(errors) > 20
    assert "\n" not in "".join(errors)


class UnknownClass:
    """A class that weights_only=True refuses to load."""


def test_foreign_file_is_an_error_with_its_path(tmp_path):
    writers = {
        "text": lambda path: path.write_text("hello\n" * 1000),
        "noise": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
        "list": lambda path: torch.save([1, 2, 3], path),
        "weights": lambda path: torch.save({"weight": torch.ones(3)}, path),
        "class": lambda path: torch.save({"format": CHECKPOINT_FORMAT, "model": UnknownClass()}, path),
        "old_format": lambda path: torch.save([1], path, _use_new_zipfile_serialization=False),
    }
    for kind, write in writers.items():
        path = tmp_path / f"{kind}.pt"  # Windows does not replace a mapped file
        write(path)
        with pytest.raises(UserError) as caught:
            load_checkpoint(path)
        assert str(path) in str(caught.value), kind
        assert "checkpoint" in str(caught.value).replace(str(path), ""), kind
        assert "\n" not in str(caught.value), kind


@pytest.mark.parametrize("other", ["vae-checkpoint-1", CHECKPOINT_FORMAT + 1, None])
def test_other_checkpoint_format_is_refused_with_remedy(tmp_path, other):
    path = tmp_path / "checkpoint_epoch_1.pt"
    torch.save({**content(), "format": other}, path)
    difference = re.escape(f"(format {other!r}, not {CHECKPOINT_FORMAT})")
    with pytest.raises(UserError, match=rf"^--resume_from .*{difference}.*train again$"):
        load_checkpoint(path)


def test_checkpoint_with_other_fields_or_options_is_of_another_version(tmp_path):
    whole = checkpoint(**WITH_DISCRIMINATOR)
    path = tmp_path / "checkpoint_epoch_1.pt"
    lacking = {name: value for name, value in whole.items() if name != "ema"}
    unknown = {**whole, "config": {**whole["config"], "shell": "rm"}}
    for changed, difference in ((lacking, "it lacks ema"), (unknown, "it has --shell")):
        save_checkpoint(path, changed)
        with pytest.raises(UserError, match=rf"another version of this toolkit \({difference}\)"):
            load_checkpoint(path)
    save_checkpoint(path, {**whole, "more": 1})  # a later version may save more
    load_checkpoint(path)


def test_missing_file_and_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"--resume_from \S+nothing\.pt: there is no such file"):
        load_checkpoint(tmp_path / "nothing.pt")
    with pytest.raises(
        UserError, match=r"is a folder: name a checkpoint in it, or use .*--resume_from latest"
    ):
        load_checkpoint(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").touch()
    with pytest.raises(UserError, match=r"is a VAE.*--init_from"):
        load_checkpoint(tmp_path)


def test_other_keys_are_another_format():
    """Without a new CHECKPOINT_FORMAT, older files would end in a TypeError instead of one line."""
    parts = (Stage, Position, History, Identity)
    keys = " ".join(f"{part.__name__}.{item.name}" for part in parts for item in fields(part))
    keys += " ".join(CHECKPOINT_KEYS)
    assert (CHECKPOINT_FORMAT, hashlib.sha256(keys.encode()).hexdigest()[:8]) == (8, "50294d43")
