"""Crops and batches from real files: independent of the number of workers; bad files are not replaced."""

import errno
import gc
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.runs import ROOT
from tests.harness.waiting import wait_until
from tests.harness.workers import notice_deaths_at_once
from vae.config.options import DataConfig, build
from vae.data import loading
from vae.data.dataset import CropDataset, collate
from vae.data.image_files import FolderImages
from vae.data.image_sets import accepted_bad_images, probe
from vae.data.loading import TrainLoader, load_validation
from vae.data.workers import cause_of_failure, resolve_num_workers
from vae.images.folder import list_images
from vae.system.errors import DataError, UserError


@pytest.fixture
def image_folder(tmp_path):
    """Twelve 40x48 images whose pixels encode number and position; 03 is truncated and 07 is small."""
    for number in range(12):
        y, x = np.mgrid[0:40, 0:48]
        pixels = np.stack([np.full_like(x, number * 10), y, x], axis=-1).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}.png")
    whole = (tmp_path / "03.png").read_bytes()
    (tmp_path / "03.png").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (20, 64)).save(tmp_path / "07.png")
    return tmp_path


def dataset(folder, image_size=32, **data):
    images = FolderImages(folder, list_images(folder))
    return CropDataset(images, DataConfig(**data), image_size=image_size, seed=9)


def same(left, right):
    return (
        torch.equal(left.images, right.images)
        and torch.equal(left.epochs, right.epochs)
        and torch.equal(left.indices, right.indices)
        and left.rejected == right.rejected
    )


def test_crop_depends_only_on_key(image_folder):
    crops = dataset(image_folder)
    torch.manual_seed(0)
    first = crops[4, 5].image
    torch.manual_seed(1)
    again = pickle.loads(pickle.dumps(crops))[4, 5].image
    assert torch.equal(first, again)
    positions = {tuple(crops[epoch, 5].image[1:, 0, 0].tolist()) for epoch in range(40)}
    assert len(positions) > 15  # 9 x 17 offsets, mirrored or not
    assert {tuple(crops[epoch, 5].image[0].unique().tolist()) for epoch in range(5)} == {(50,)}
    tops, lefts = zip(*positions, strict=True)
    assert max(tops) <= 8
    assert max(lefts) <= 47


def test_half_of_the_crops_are_mirrored(image_folder):
    crops = dataset(image_folder)
    mirrored = sum(bool(crops[e, 0].image[2, 0, 0] > crops[e, 0].image[2, 0, 1]) for e in range(200))
    assert 70 < mirrored < 130
    plain = dataset(image_folder, horizontal_flip=False)
    assert all(plain[e, 0].image[2, 0, 0] < plain[e, 0].image[2, 0, 1] for e in range(20))


def test_small_images_are_rejected_or_enlarged(image_folder):
    sample = dataset(image_folder)[0, 7]
    assert sample.image is None
    assert sample.rejection.reason == "too_small"
    for part in ("20x64", "--image_size 32", "--upscale"):
        assert part in sample.rejection.detail
    assert dataset(image_folder, upscale=True)[0, 7].image.shape == (3, 32, 32)
    flat = dataset(image_folder, upscale=True, image_size=80, crop="center", horizontal_flip=False)[
        0, 2
    ].image
    assert flat.shape == (3, 80, 80)
    assert abs(int(flat[2, 40, 40]) - 24) <= 1  # the centre is unchanged


def test_rejected_images_make_the_batch_smaller(image_folder):
    crops = dataset(image_folder)
    batch = collate([crops[1, index] for index in (2, 3, 7, 11)], image_size=32)
    assert batch.images.shape == (2, 3, 32, 32)
    assert batch.indices.tolist() == [2, 11]
    assert batch.epochs.tolist() == [1, 1]
    assert [rejection.name for rejection in batch.rejected] == ["03.png", "07.png"]
    none = collate([crops[0, 3]], image_size=32)
    assert none.images.shape == (0, 3, 32, 32)
    assert none.indices.dtype == none.epochs.dtype == torch.int64
    assert same(pickle.loads(pickle.dumps(batch)), batch)


@pytest.mark.gpu
def test_batches_can_be_pinned(image_folder):
    batch = collate([dataset(image_folder)[0, 0]], image_size=32).pin_memory()
    assert batch.images.is_pinned()


def test_workers_and_resuming_change_neither_batches_nor_random_state(image_folder):
    crops = dataset(image_folder)
    state = torch.random.get_rng_state()
    with TrainLoader(crops, local_batch=3) as alone, TrainLoader(crops, local_batch=3, num_workers=2) as many:
        assert alone.steps_per_epoch == 4
        reference = {epoch: list(alone.batches(epoch)) for epoch in range(3)}
        for epoch in (0, 1):
            assert all(map(same, many.batches(epoch), reference[epoch]))
        resumed = list(many.batches(1, first_step=2))
        assert len(resumed) == 2
        assert all(map(same, resumed, reference[1][2:]))
        stopped = many.batches(2)
        next(stopped)
        stopped.close()
        again = list(many.batches(2))
        assert len(again) == 4
        assert all(map(same, again, reference[2]))
    assert torch.equal(state, torch.random.get_rng_state())
    seen = [i for b in reference[0] for i in b.indices.tolist()] + [
        int(r.name[:2]) for b in reference[0] for r in b.rejected
    ]
    assert sorted(seen) == list(range(12))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_loaders_leave_no_files_open(image_folder):
    """Validations start processes again and again, and garbage is collected rarely."""

    def load() -> None:
        with TrainLoader(dataset(image_folder), local_batch=2, num_workers=1) as loader:
            list(loader.batches(0))

    load()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        load()
        load()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        gc.enable()


@pytest.mark.slow
def test_workers_can_be_started_as_on_windows(image_folder):
    """Without a copy of the main process, as with forkserver, the default of newer Python."""
    crops = dataset(image_folder)
    with TrainLoader(crops, local_batch=4) as alone:
        reference = list(alone.batches(0))
    with TrainLoader(crops, local_batch=4, num_workers=1, start_method="spawn") as started:
        assert all(map(same, started.batches(0), reference))
        (process,) = multiprocessing.active_children()
    with pytest.raises(ValueError, match="closed"):  # its end was noticed
        process.is_alive()


@pytest.fixture
def fast_poll(monkeypatch):
    notice_deaths_at_once(monkeypatch)


class FailingDataset(CropDataset):
    """Its decoding processes end by a signal or an exit code, raise an error, or cannot pass on a batch."""

    failure: int | Exception

    def __getitem__(self, key):
        if multiprocessing.parent_process() is None:
            return super().__getitem__(key)
        if isinstance(self.failure, UnsendableError):
            ForkingPickler.dumps = self.failure.dumps
            return super().__getitem__(key)
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure >= 0:
            os._exit(self.failure)
        if self.failure != -signal.SIGKILL:
            signal.signal(-self.failure, signal.SIG_DFL)  # DataLoader's handler prints a line of its own
        os.kill(os.getpid(), -self.failure)
        return None


class UnsendableError(Exception):
    """Processes cannot pass on their batches, as with Docker's small /dev/shm."""

    def dumps(self, result):
        """Raise the error for all that contains images."""
        if not isinstance(result[1], Exception):
            raise self.args[0]
        return pickle.dumps(result)


FULL = RuntimeError("shared memory(shm) </x>: No space left on device (28)")


def failures():
    yield OSError(errno.EMFILE, "Too many open files"), "too many files.*ulimit -n 4096.*--num_workers 0"
    if sys.platform != "win32":  # each of its processes imports PyTorch, which takes minutes
        yield UnsendableError(FULL), "shared memory is full.*--shm-size 8g.*--num_workers 0"
        yield -signal.SIGSEGV, "SIGSEGV.*usually.*prepare_data.py --mode validate.*"
        yield 1, "one ended .code 1., its own output is above, or use --num_workers 0"


@pytest.mark.parametrize(("failure", "line"), list(failures()), ids=repr)
@pytest.mark.parametrize("validates", [False, True])
def test_a_failing_process_ends_the_wait_with_its_cause(
    image_folder, fast_poll, capfd, monkeypatch, failure, line, validates
):
    monkeypatch.setattr(FailingDataset, "failure", failure, raising=False)
    monkeypatch.setattr(loading, "CropDataset", FailingDataset)
    images = FolderImages(image_folder, list_images(image_folder))
    handler = getattr(signal, "SIGCHLD", signal.SIGINT)
    before = signal.getsignal(handler)
    if validates:
        batches = load_validation(images, range(12), image_size=32, batch_size=2, num_workers=2)
    else:
        crops = FailingDataset(images, image_size=32)
        crops.failure = failure  # processes that are not forks get it with this object
        batches = TrainLoader(crops, local_batch=2, num_workers=2).batches(0)
    with pytest.raises(DataError, match=f"^decoding processes failed: .*({line})$"):
        list(batches)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(handler) is before  # DataLoader's handler raises in the middle of a step
    assert capfd.readouterr().err == ""


def test_an_error_in_our_code_is_not_one_of_the_system(image_folder):
    crops = FailingDataset(FolderImages(image_folder, list_images(image_folder)), image_size=32)
    crops.failure = ZeroDivisionError("any")
    with TrainLoader(crops, local_batch=2, num_workers=1) as loader, pytest.raises(ZeroDivisionError):
        list(loader.batches(0))


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process, and locks in shared memory")
@pytest.mark.parametrize(
    ("error", "line"),
    [(OSError(errno.EROFS, "Read-only"), "/dev/shm"), (OSError(errno.ENOSPC, "Full"), "--shm-size")],
)
def test_processes_that_cannot_start_name_the_system(image_folder, monkeypatch, error, line):
    """Python's locks are in shared memory."""

    def refuse(*_):
        raise error

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(DataError, match=f"{line}.*--num_workers 0"):
        list(TrainLoader(dataset(image_folder), local_batch=2, num_workers=2).batches(0))


CAUSES = [
    (OSError("AF_UNIX path too long"), [], "TMPDIR"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), [], "TMPDIR"),
    (RuntimeError("received 0 items of ancdata"), [], "ulimit -n"),
    (RuntimeError("unable to open file </torch_1>: Too many open files (24)"), [], "ulimit -n"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), [], "ulimit -u"),
    (RuntimeError("can't start new thread"), [], "ulimit -u"),
    (RuntimeError("open shared file mapping: </x>, error code: <1455>"), [], "paging file"),
    (RuntimeError("unable to open shared memory object </torch_1>: Permission denied (13)"), [], "/dev/shm"),
    (MemoryError(), [], "memory ran out"),
    (RuntimeError("unable to mmap 12 bytes: Cannot allocate memory (12)"), [], "memory ran out"),
    (OSError(errno.ENOSPC, "No space left on device", "/cache/1.tar"), [], "/cache/1.tar"),
    (OSError(errno.EIO, "Input/output error", "/share/1.png"), [], "/share/1.png"),
    (EOFError(), [0], "code 0"),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), [1, 1], "code 1"),
    (OSError(errno.EMFILE, "Too many open files"), [errno.EMFILE], "ulimit -n"),  # of pebble's processes
    (None, [errno.EMFILE], "code 24"),
    (None, [0xC0000005], "--mode validate"),
    (None, [0x40010004], "code 1073807364"),  # of a process that Windows ends when it shuts down
]
if sys.platform != "win32":
    CAUSES += [
        (RuntimeError("exited unexpectedly"), [-signal.SIGKILL], "SIGKILL.*usually because memory ran out"),
        (RuntimeError("exited unexpectedly"), [-signal.SIGBUS], "SIGBUS.*usually because.*--shm-size"),
        (RuntimeError("exited unexpectedly"), [-signal.SIGABRT], "--mode validate"),
        (RuntimeError("exited unexpectedly"), [-signal.SIGTERM], "SIGTERM"),
    ]


@pytest.mark.parametrize(("error", "codes", "line"), CAUSES, ids=str)
def test_images_are_blamed_for_crashes_alone(error, codes, line):
    cause = cause_of_failure(error, codes)
    assert re.search(line, cause)
    assert ("--mode validate" in cause) == (line == "--mode validate")
    assert "\n" not in cause


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_an_image_is_not_bad_because_too_many_files_are_open(image_folder):
    import resource

    crops = dataset(image_folder)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            crops[0, 0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class HangingDataset(CropDataset):
    def __getitem__(self, key):
        time.sleep(60)


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_images_can_be_ended(image_folder, fast_poll, workers, monkeypatch):
    """An exception of `while_waiting` ends the wait at once, and the processes, even if they are stopped."""
    crops, calls = HangingDataset(FolderImages(image_folder, list_images(image_folder)), image_size=32), []

    def while_waiting():
        calls.append(1)
        if len(calls) == 3:
            for process in multiprocessing.active_children():
                os.kill(process.pid, getattr(signal, "SIGSTOP", signal.SIGTERM))
            raise InterruptedError

    monkeypatch.setattr(loading, "END_SECONDS", 60.0)
    started = time.monotonic()
    with (
        TrainLoader(crops, local_batch=2, num_workers=workers, while_waiting=while_waiting) as loader,
        pytest.raises(InterruptedError),
    ):
        list(loader.batches(0))
    assert len(calls) == 3
    assert time.monotonic() - started < 30  # it waits neither for END_SECONDS nor for an image
    assert multiprocessing.active_children() == []


INTERRUPTED = """
import signal, sys
from vae.data.dataset import CropDataset
from vae.data.image_files import FolderImages
from vae.images.folder import list_images
from vae.data.loading import TrainLoader
stopped = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stopped.append(1))
root = sys.argv[1]
crops = CropDataset(FolderImages(root, list_images(root)), image_size=32)
loader = TrainLoader(crops, local_batch=1, num_workers=2)
count = 0
for epoch in range(10000):
    for batch in loader.batches(epoch):
        count += 1
        if count == 20:
            print("running", flush=True)
        if stopped:
            # every worker survived the signal: full epochs are still loaded
            assert len(list(loader.batches(epoch + 1))) == 12
            loader.close()
            print("closed", flush=True)
            sys.exit(75)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a process group's Ctrl-C")
def test_workers_survive_signals_to_the_process_group(image_folder):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(image_folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "running\n"
    for number in (signal.SIGINT, signal.SIGTERM):  # like terminals and schedulers: to the whole group
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (75, "closed\n", "")


def test_validation_loads_every_image_once_and_reports_rejections(image_folder):
    names = list_images(image_folder)
    images = FolderImages(image_folder, names)
    batches = list(load_validation(images, range(len(names)), image_size=32, batch_size=5))
    many = list(load_validation(images, range(len(names)), image_size=32, batch_size=5, num_workers=2))
    assert all(map(same, batches, many))
    assert [i for batch in batches for i in batch.indices.tolist()] == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert sum(len(batch.rejected) for batch in batches) == 2
    assert batches[0].images[2, :, 0, 0].tolist() == [20, 4, 8]


def test_probe_reports_reasons_example_and_remedy(image_folder):
    with pytest.raises(DataError) as caught:
        probe(dataset(image_folder, image_size=64), 1.0)
    message = str(caught.value)
    for part in ("--data_path", "11 too_small", "1 truncated", "00.png", "48x40", "--upscale"):
        assert part in message
    assert message.count("--upscale") == 1
    assert "\n" not in message


def test_probe_of_a_small_set_compares_all_images_with_the_accepted_fraction(image_folder, capsys):
    images = dataset(image_folder)
    assert [rejection.name for rejection in probe(images, 0.2)] == ["03.png", "07.png"]
    warning = capsys.readouterr().out
    assert "2 of 12" in warning
    assert "03.png" in warning
    with pytest.raises(DataError) as caught:
        probe(images, 0.1)
    message = str(caught.value)
    for part in ("2 of 12", "the 1 of --max_bad_fraction 0.1", "1 truncated", "03.png", "remove", "or raise"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(("fraction", "total", "accepted"), [(0.05, 12, 1), (0.05, 40, 2), (0.0, 1000, 0)])
def test_one_bad_image_is_accepted_unless_the_fraction_is_zero(fraction, total, accepted):
    assert accepted_bad_images(fraction, total) == accepted


def test_num_workers_accepts_auto_and_integers():
    assert resolve_num_workers("3") == 3
    assert resolve_num_workers("0") == 0
    assert 1 <= resolve_num_workers("auto") <= 12
    assert resolve_num_workers("auto", processes_here=1000) == 1
    for junk in ("-1", "two", "1.5", "", "²"):
        with pytest.raises(UserError, match="--num_workers"):
            build({"num_workers": junk})
