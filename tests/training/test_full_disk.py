"""A full disk ends no run: everything that fails is said once, and written when there is room again."""

import os
import re
import shutil

import pytest

from tests.harness.checkpoints import checkpoint
from tests.harness.faults import Fault, injected, limit_file_size, run_forked
from tests.harness.training_runs import assert_same, last_checkpoint, reproducible_records
from vae.config.options import build
from vae.memory.plan import checkpoint_bytes
from vae.system.errors import UserError
from vae.training.logbook import Appender
from vae.training.report import space_warning
from vae.training.run import train
from vae.training.stages import Position, Stage

limits = pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of file sizes")


@limits
def test_what_a_full_disk_refuses_is_written_later(tmp_path, capsys):
    """The disk is full in the middle of a line, twice."""
    path = tmp_path / "new" / "lines.txt"
    file = Appender(path)
    file.write(b"one\n")
    for part in (b"two\n", b"three\n"):
        limit_file_size(path.stat().st_size + 2)
        try:
            file.write(part)
            file.write(b"more\n")
        finally:
            limit_file_size(None)
        assert path.read_bytes()[-1:] != b"\n"
        file.write(b"last\n")
    assert path.read_bytes() == b"one\ntwo\nmore\nlast\nthree\nmore\nlast\n"
    # Once for each time.
    assert capsys.readouterr().out.count(f"{path} cannot be written: File too large") == 2


def test_warning_before_the_start_if_the_checkpoints_do_not_fit(tmp_path, monkeypatch):
    config = build(checkpoint()["config"])
    size, free = checkpoint_bytes(config), 0

    def disk_usage(_path):
        return type("Usage", (), {"free": free})

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = 6 * size + size // 4  # 3 newest, the best, the last of the stage, the one being written
    run = [Stage(0, 10, 32, 2)], Position()
    assert space_warning(tmp_path, config, *run) is None
    free -= 1
    warning = space_warning(tmp_path, config, *run)
    assert warning.startswith(f"--output_dir {tmp_path} has ")
    assert "--keep_checkpoints 3" in warning
    with (tmp_path / "checkpoint_epoch_1.pt").open("wb") as file:  # a resumed run has written some
        file.truncate(size)
    assert space_warning(tmp_path, config, *run) is None


def test_short_runs_write_fewer_checkpoints_than_are_kept(tmp_path, monkeypatch):
    config = build({**checkpoint()["config"], "max_steps": 3})
    size = checkpoint_bytes(config)
    free = 2 * size + size // 4  # of one epoch, and of a signal
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert space_warning(tmp_path, config, [Stage(0, 1, 32, 2)], Position()) is None
    assert space_warning(tmp_path, config, [Stage(0, 9, 32, 2)], Position(epoch=8, step=2)) is None
    assert "(4 checkpoints" in space_warning(tmp_path, config, [Stage(0, 9, 32, 2)], Position())


def test_run_warns_before_its_first_step(tiny, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert train({**tiny, "max_steps": 1}) == 0
    printed = capsys.readouterr().out
    assert printed.index("WARNING: --output_dir") < printed.index("step 1:")


@limits
@pytest.mark.slow
def test_run_survives_a_full_disk_and_equals_an_undisturbed_one(tiny, tmp_path):
    """In steps 4 to 9 of 12 nothing can be written: records, samples, checkpoints, the output itself."""
    given = {**tiny, "num_epochs": 4, "log_freq": 1, "save_samples_freq": 1, "checkpoint_steps": 1}
    full, free = Fault("full_disk", "step", nth=4), Fault("free_disk", "step", nth=10)
    log = tmp_path / "log.txt"
    assert run_forked({**given, "output_dir": str(tmp_path / "undisturbed")}) == [0]
    assert run_forked(given, full, free, log=log) == [0], log.read_text()
    text = log.read_text()
    for name in ("metrics.jsonl", "samples", "logs", "results.png"):
        assert len(re.findall(rf"WARNING: \S+{name}\S* cannot be written", text)) == 1, text
    contents = [last_checkpoint(tmp_path / name) for name in ("run", "undisturbed")]
    for content in contents:
        content["config"].pop("output_dir")
        content.pop("run")
    assert_same(*contents, "checkpoint")
    assert_same(*(reproducible_records(tmp_path / name, "train") for name in ("run", "undisturbed")), "train")


@limits
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_disk_that_is_full_from_the_start_stops_the_run_only_at_its_last_save(tiny, tmp_path, capsys):
    """Not even config.json can be written."""
    with (
        injected(Fault("full_disk", r"open:vae-scratch.*config\.json")),
        pytest.raises(UserError, match=r"the last checkpoint could not be written: .*File too large"),
    ):
        train({**tiny, "log_freq": 1, "save_samples_freq": 2})
    printed = capsys.readouterr().out
    for name in ("config.json", "split.json", "run.json", "metrics.jsonl", "samples", "logs"):
        assert len(re.findall(rf"WARNING: \S+{name}\S* cannot be written", printed)) == 1, printed
    assert "step 6:" in printed
