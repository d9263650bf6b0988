"""Forged and foreign checkpoints: each is refused in one line, without filling the memory."""

import hashlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.checkpoints import WITH_DISCRIMINATOR, checkpoint
from vae.interop.checkpoint_archive import ArchiveError, read_archive
from vae.interop.checkpoint_content import ContentError
from vae.interop.checkpoint_file import CHECKPOINT_FORMAT, load_checkpoint, record_path, save_checkpoint
from vae.interop.checkpoint_schema import check_content
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError
from vae.training.checkpoints.store import saved_step

NAN, INF = float("nan"), float("inf")
WEIGHT = "decoder.conv_out.weight"


def put(*keys: Any, value: Any) -> Callable[[dict], None]:
    """Set content[key][key]... to `value`."""

    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def fill(*keys: Any, value: float) -> Callable[[dict], None]:
    """Set one number of a tensor."""

    def change(content: dict) -> None:
        for key in keys:
            content = content[key]
        content[(0,) * content.dim()] = value

    return change


def repeated(content: dict) -> None:
    """A tensor of the expected shape whose numbers are all the same one."""
    content["model"][WEIGHT] = torch.zeros(1, 1, 1, 1).expand(content["model"][WEIGHT].shape)


def other_architecture(content: dict) -> None:
    content["config"] |= {"channels": [8, 32], "z_channels": 4}


def endless_architecture(content: dict) -> None:
    """Building this network would take years."""
    content["config"]["layers_per_block"] = 10**9


FORGED = {
    "no_model": (drop("model"), "lacks model"),
    "list_as_model": (put("model", value=[1, 2]), "model is a list"),
    "text_as_tensor": (put("model", WEIGHT, value="x" * 1000), WEIGHT),
    "number_as_name": (put("model", 3, value=torch.zeros(1)), "a key of model is 3"),
    "missing_weight": (drop("model", WEIGHT), f"lacks {WEIGHT}"),
    "other_shape": (put("model", WEIGHT, value=torch.zeros(3, 8, 1, 1)), r"\(3, 8, 1, 1\)"),
    "other_dtype": (put("model", WEIGHT, value=torch.zeros(3, 8, 3, 3).half()), "float16"),
    "sparse_weight": (put("ema", WEIGHT, value=torch.zeros(3, 8).to_sparse()), "not a dense tensor"),
    "repeated_numbers": (repeated, "larger than its data"),
    "nan_weight": (fill("model", WEIGHT, value=NAN), rf"model: {WEIGHT} .*not finite"),
    "inf_ema": (fill("ema", WEIGHT, value=INF), rf"ema: {WEIGHT} .*not finite"),
    "no_moments": (put("optimizers", 0, "state", value={}), "moments of 0 parameters"),
    "moments_of_one": (drop("optimizers", 0, "state", 3), "moments of"),
    "no_second_moment": (drop("optimizers", 0, "state", 0, "exp_avg_sq"), "parameter 0"),
    "one_optimizer": (drop("optimizers", 1), "1 optimizers, not 2"),
    "no_discriminator": (put("discriminator", value=None), "lacks discriminator"),
    "other_parameters": (put("optimizers", 0, "param_groups", 0, "params", value=[0]), "optimizer 0"),
    "negative_step": (put("position", "step", value=-7), "position.step is -7"),
    "huge_step": (put("position", "step", value=10**5000), "position.step is a huge number"),
    "no_stages": (put("stages", value=[]), "no stages"),
    "stage_of_0_px": (put("stages", 0, "image_size", value=0), "image_size is 0"),
    "stages_with_a_gap": (put("stages", 0, "first_epoch", value=5), "begin at"),
    "list_in_history": (put("history", "best", value={"psnr": []}), "history.best.'psnr' is a list"),
    "list_as_run": (put("run", value=[]), "run is a list"),
    "other_ancestor": (put("run", "ancestors", value=[["a", "b"]]), r"run.ancestors\[0\]\[1\] is 'b'"),
    "list_as_rollbacks": (put("rollbacks", value=[1]), "rollbacks is a list"),
    "text_in_rollbacks": (put("rollbacks", 0, value=["1"]), r"rollbacks.0\[0\] is '1'"),
    "text_as_scaling": (put("latent_scaling", value=["1", "2"]), "latent_scaling"),
    "unknown_option": (put("config", "shell", value="rm"), "unknown option 'shell'"),
    "text_as_option": (put("config", "learning_rate", value="fast"), "--learning_rate 'fast'"),
    "huge_whole_option": (put("config", "seed", value=10**5000), "--seed"),
    "option_of_10_mb": (put("config", "init", value="y" * 10**7), "--init 'y"),
    "no_channels": (drop("config", "channels"), "and its config"),
    "other_architecture": (other_architecture, r"channels \[8, 16\], and its config \(8, 32\)"),
    "endless_architecture": (endless_architecture, "layers_per_block"),
    "endless_discriminator": (put("config", "disc_layers", value=10**9), "--disc_layers"),
    "indivisible_norms": (put("config", "norm_groups", value=5), "--norm_groups 5"),
    "other_topology": (put("contract", "topology", "streams", value="many"), "contract.topology.streams"),
    "infinite_scaling": (put("latent_scaling", value=[INF, 0.0]), "latent_scaling is not finite"),
}


LAST = ("optimizers", 0, "state", 119)  # the momentum of a hidden weight
FORGED_MUON = {
    "nan_momentum": (
        fill(*LAST, "momentum_buffer", value=NAN),
        "parameter 119 .*not finite",
    ),
    "other_shape": (put(*LAST, "momentum_buffer", value=torch.zeros(2)), r"\(2,\)"),
    "no_momentum": (drop(*LAST, "momentum_buffer"), "no moments of parameter 119"),
    "moments_of_adamw": (put(*LAST, "exp_avg", value=torch.zeros(2)), "no moments of parameter 119"),
    "moments_of_some": (drop(*LAST), "moments of 119 parameters, not of 120"),
    "one_group": (drop("optimizers", 0, "param_groups", 1), "not Muon's state of 120 parameters"),
    "other_optimizer": (put("config", "optimizer", value="adamw"), "not AdamW's state of 120 parameters"),
}


def refusal(path: Path) -> str:
    """The message about an unusable checkpoint, which is the same line for every use of the file."""
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message.replace(str(path), "")) < 400
    with pytest.raises(UserError, match=r"^--vae "):
        load_vae(path)
    return message


@pytest.mark.parametrize(
    ("optimizer", "name"), [*(("adamw", name) for name in FORGED), *(("muon", name) for name in FORGED_MUON)]
)
def test_forged_content_is_refused_in_one_line(optimizer, name):
    change, pattern = (FORGED if optimizer == "adamw" else FORGED_MUON)[name]
    content = checkpoint(**WITH_DISCRIMINATOR, optimizer=optimizer)
    change(content)
    with pytest.raises(ContentError, match=pattern) as caught:
        check_content(content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_forged_content_in_a_file_is_refused_with_its_path(tmp_path):
    path = tmp_path / "checkpoint_epoch_1.pt"
    save_checkpoint(path, {**checkpoint(), "model": {WEIGHT: torch.zeros(3)}})
    assert "cannot be used" in refusal(path)


def test_unchanged_checkpoints_are_accepted(tmp_path):
    path = tmp_path / "checkpoint_epoch_1.pt"
    for options in (
        {},
        WITH_DISCRIMINATOR,
        {"train_part": "decoder"},
        {"train_part": "decoder", "optimizer": "muon"},
        {"latent_norm": True, "ema_decay": 0.0},
    ):
        save_checkpoint(path, checkpoint(**options))
        load_checkpoint(path)
    content = checkpoint(**WITH_DISCRIMINATOR)
    content["optimizers"][1]["state"] = {}  # before --disc_start
    save_checkpoint(path, {**content, "more": 1})  # a later version may save more
    load_checkpoint(path)


def doubled(levels: int) -> list:
    """A list that has two references to the one below it, and so on: few bytes, 2^levels values."""
    value: list = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


def endless() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, doubled(40)) for key in ("format", "config", "contract", "more")),
        ("history", endless()),
        ("run", {"a": {"b": doubled(40)}}),
    ],
)
def test_content_that_refers_to_itself_is_refused_at_once(tmp_path, key, value):
    path = tmp_path / "checkpoint_epoch_1.pt"
    content = {"format": CHECKPOINT_FORMAT, **checkpoint()}
    torch.save({**content, key: value}, path)
    assert "nested too deeply, or refers to itself" in refusal(path)
    assert saved_step(path) == -1


# ---- forged archives -------------------------------------------------------------------------------------


def forge(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a checkpoint with changed parts and the SHA-256 of the result."""
    saved = io.BytesIO()
    torch.save({"format": CHECKPOINT_FORMAT, **checkpoint()}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    record_path(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def replace_pickle(pickle: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, data: pickle if name.endswith("data.pkl") else data


def doubled_tuple(levels: int) -> bytes:
    """A pickle with a tuple of tuples as a key, whose hash takes 2^levels steps."""
    tuples = b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(levels))
    return b"\x80\x02}K\x01\x85q\x00" + tuples + b"K\x01s."


ARCHIVES = {
    "key_that_takes_years": (replace_pickle(doubled_tuple(60)), "a key is neither text"),
    "memo_without_entry": (replace_pickle(b"\x80\x02h\x07."), "not a checkpoint"),
    "array_of_1_gb": (replace_pickle(b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R."), "builtins"),
    "command": (replace_pickle(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "os system"),
    "computed_name": (replace_pickle(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."), "it uses"),
    "deep_lists": (replace_pickle(b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."), "not a checkpoint"),
    "no_pickle": (replace_pickle(b""), "not a checkpoint"),
    "other_size": (lambda name, data: data[:4] if name.endswith("data/0") else data, "not a checkpoint"),
}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("record", [True, False], ids=["with_record", "without_record"])
def test_forged_archive_is_refused_in_one_line(tmp_path, name, record):
    change, pattern = ARCHIVES[name]
    path = tmp_path / "checkpoint_epoch_1.pt"
    forge(path, change)
    if not record:
        record_path(path).unlink()
    assert pattern in refusal(path)
    assert saved_step(path) == -1


@pytest.mark.parametrize("record", [True, False], ids=["with_record", "without_record"])
def test_compressed_parts_are_refused_before_they_are_read(tmp_path, record):
    """0.3 MB of file would become 256 MB of memory, and can become a thousand times its size."""
    path = tmp_path / "checkpoint_epoch_1.pt"
    forge(path, lambda name, data: bytes(2**28) if name.endswith("data/0") else data, zipfile.ZIP_DEFLATED)
    if not record:
        record_path(path).unlink()
    resource = pytest.importorskip("resource")  # Windows has none
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is compressed" in refusal(path)
    assert saved_step(path) == -1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_overlapping_parts_are_refused(tmp_path):
    """Every entry of the list of parts is the same 8 MB of the file."""
    path = tmp_path / "checkpoint_epoch_1.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02].")
        archive.writestr("archive/data/0", bytes(2**23))
        first = archive.infolist()[1]
        for number in range(1, 200):
            copy = zipfile.ZipInfo(f"archive/data/{number}")
            copy.file_size, copy.compress_size, copy.CRC = first.file_size, first.compress_size, first.CRC
            copy.header_offset = first.header_offset
            archive.filelist.append(copy)
    assert "parts are larger than the file" in refusal(path)


def peak_kib() -> int:
    resource = pytest.importorskip("resource")  # Windows has none
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Numbers:
    """What a pickle refers to as the numbers of a tensor."""

    def __init__(self, *reference: Any):
        self.reference = reference


class Rebuilt:
    """What a pickle calls to make a tensor."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return torch._utils._rebuild_tensor_v2, (*self.arguments, False, {})


class Forger(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, Numbers) else None


def archive_of(path: Path, value: Any, data: bytes = bytes(16)) -> bytes:
    """Write an archive with this value and one part of numbers; returns its bytes."""
    pickled = io.BytesIO()
    Forger(pickled, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled.getvalue())
        archive.writestr("a/data/0", data)
    return path.read_bytes()


FOUR = ("storage", torch.FloatStorage, "0", "cpu", 4)
TENSORS = {
    "2_tb_of_numbers": (("storage", torch.FloatStorage, "0", "cpu", 2**39), 0, (2**39,), (1,)),
    "no_such_part": (("storage", torch.FloatStorage, "1", "cpu", 4), 0, (4,), (1,)),
    "negative_count": (("storage", torch.FloatStorage, "0", "cpu", -1), 0, (4,), (1,)),
    "text_as_type": (("storage", "FloatStorage", "0", "cpu", 4), 0, (4,), (1,)),
    "endless_key": (("storage", torch.FloatStorage, doubled(40), "cpu", 4), 0, (4,), (1,)),
    "no_reference": ((doubled(40),), 0, (4,), (1,)),
    "larger_than_its_data": (FOUR, 0, (5,), (1,)),
    "repeated_numbers": (FOUR, 0, (2**40,), (0,)),
    "behind_its_data": (FOUR, 3, (2,), (1,)),
    "stride_beyond_its_data": (FOUR, 0, (2, 2), (3, 1)),
    "stride_of_2_to_the_63": (FOUR, 0, (2, 2), (2**63, 2**63)),
    "million_dimensions": (FOUR, 0, (2**31,) * 10**6, (1,) * 10**6),
    "fraction_as_side": (FOUR, 0, (1.5,), (1,)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_forged_tensors_are_refused_without_memory(tmp_path, name):
    reference, *view = TENSORS[name]
    archive_of(tmp_path / "a.pt", {"x": Rebuilt(Numbers(*reference), *view)})
    before = peak_kib()
    for with_tensors in (True, False):
        with pytest.raises(ArchiveError):
            read_archive(tmp_path / "a.pt", with_tensors=with_tensors)
    assert peak_kib() - before < 100 * 1024


def test_tensor_of_a_forged_archive_is_a_view_of_its_part(tmp_path):
    """The archives of this file are right apart from what each test forges."""
    archive_of(
        tmp_path / "a.pt", {"x": Rebuilt(Numbers(*FOUR), 1, (3,), (1,))}, struct.pack("<4f", 1, 2, 3, 4)
    )
    assert read_archive(tmp_path / "a.pt")["x"].tolist() == [2, 3, 4]


def large(path: Path) -> bytes:
    return archive_of(path, doubled(19), bytes(2**20))


def two_archives(path: Path) -> bytes:
    return large(path) + archive_of(path, {"x": 1})


def two_directories(path: Path) -> bytes:
    """zipfile reads the directory before the end, and PyTorch the one to which the end refers."""
    content = archive_of(path, {"x": 1})
    start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    other = content[start:end]
    parts = b"PK\x03\x04".ljust(len(other)) + content[:start]
    return parts + other + content[start : end + 16] + struct.pack("<LH", len(parts), 0)


def comment(path: Path) -> bytes:
    """The end of the second archive is within the comment of the first one."""
    second, first = large(path), archive_of(path, {"x": 1})
    return first[:-2] + struct.pack("<H", 22) + second[-22:]


def long_directory(path: Path) -> bytes:
    """A list of 10 MB, whose entries would need a hundred times as much."""
    content = archive_of(path, {"x": 1})
    start = content.index(b"PK\x01\x02")
    entry = content[start : content.index(b"PK\x01\x02", start + 4)]
    directory = entry * (10 * 2**20 // len(entry))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), start, 0)
    return content[:start] + directory + end


BYTES = {
    "two_archives": two_archives,
    "two_directories": two_directories,
    "comment": comment,
    "long_directory": long_directory,
    "trailing_data": lambda path: archive_of(path, {"x": 1}) + b"x" * 10**5,
    "prepended_data": lambda path: b"PK\x03\x04" + b"x" * 1000 + archive_of(path, {"x": 1}),
}


@pytest.mark.parametrize("name", BYTES)
def test_forged_zip_files_are_refused_without_memory(tmp_path, name):
    (tmp_path / "a.pt").write_bytes(BYTES[name](tmp_path / "b.pt"))
    before = peak_kib()
    with pytest.raises(ArchiveError):
        read_archive(tmp_path / "a.pt")
    assert peak_kib() - before < 100 * 1024


# ---- files that are no checkpoint ------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "checkpoint_epoch_1.pt")
    save_checkpoint(tmp_path / "checkpoint_epoch_2.pt", checkpoint())
    record_path(tmp_path / "checkpoint_epoch_2.pt").unlink()
    os.mkfifo(record_path(tmp_path / "checkpoint_epoch_2.pt"))
    for name in ("checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt.sha256"):
        with pytest.raises(UserError, match=f"{name} cannot be read: it is not a regular file"):
            load_checkpoint(tmp_path / name.removesuffix(".sha256"))
