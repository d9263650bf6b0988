"""Tar files as other programs write them: webdataset's ShardWriter, img2dataset, and odd ones."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tests.harness.image_kinds import detailed, encoded

Member = tuple[str, bytes]


def write_tar(
    path: Path, members: Iterable[Member | tarfile.TarInfo], format: int = tarfile.USTAR_FORMAT
) -> Path:
    """A tar file of members (name, bytes), or of headers without bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size, info.mode = len(member[1]), 0o444
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def picture(number: int, kind: str = "PNG") -> bytes:
    """One of many images of 64 px."""
    return encoded(detailed(seed=number), kind)


def webdataset_sample(number: int) -> list[Member]:
    """As ShardWriter writes it: sorted extensions, here with a folder in the key."""
    key = f"class{number % 2}/{number:06}"
    return [
        (f"{key}.cls", str(number % 2).encode()),
        (f"{key}.png", picture(number)),
        (f"{key}.txt", b"a text"),
    ]


def img2dataset_sample(number: int) -> list[Member]:
    """As img2dataset writes it: jpg, json, txt."""
    key, caption = f"{number:09}", f"picture {number}"
    content = {"caption": caption, "url": "http://x", "key": key, "status": "success", "punsafe": number / 10}
    texts = [(f"{key}.json", json.dumps(content).encode()), (f"{key}.txt", caption.encode())]
    return [(f"{key}.jpg", picture(number, "JPEG")), *texts]


def write_webdataset(folder: Path, tars: int = 3, images: int = 5) -> Path:
    """kodak-000000.tar, ... of so many images each."""
    for number in range(tars):
        samples = map(webdataset_sample, range(number * images, (number + 1) * images))
        write_tar(folder / f"kodak-{number:06}.tar", [member for sample in samples for member in sample])
    return folder


def write_img2dataset(folder: Path, tars: int = 2, images: int = 10) -> Path:
    """00000.tar, ... with the other files that img2dataset writes."""
    for number in range(tars):
        samples = map(img2dataset_sample, range(number * images, (number + 1) * images))
        path = write_tar(folder / f"{number:05}.tar", [member for sample in samples for member in sample])
        path.with_suffix(".parquet").write_bytes(b"PAR1")
        (folder / f"{number:05}_stats.json").write_text(json.dumps({"count": images}))
    return folder


def images_of(*tars: Path) -> dict[str, bytes]:
    """The bytes of all images, by the name of the tar file and the member."""
    found = {}
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".png", ".jpg")):
                    file = tar.extractfile(member)
                    assert file is not None
                    found[f"{path.name}/{member.name.removeprefix('./')}"] = file.read()
    return found
