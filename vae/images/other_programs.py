"""What folders have beside photographs: files and folders of systems and of other programs, known by name."""

import os
import re

from vae.images.formats import EXTENSIONS_OF, PLUGINS

# In lower case; * stands for any characters, and what is before a slash is the folder around it.
NAMES = {
    "Windows": ("$recycle.bin", "system volume information", "thumbs.db", "ehthumbs*.db", "desktop.ini"),
    "macOS": ("__macosx", "._*", ".ds_store", "icon\r", ".trashes", ".spotlight-v100", ".fseventsd"),
    "Apple Photos": ("*.photoslibrary/resources", "*.photoslibrary/private", "*.photoslibrary/database"),
    "iPhoto": ("*.photolibrary/previews", "*.photolibrary/thumbnails"),
    "Linux": ("lost+found", ".trash-*", ".thumbnails"),
    "Synology": ("@eadir", "#recycle", "#snapshot", "synophoto_*", "synofile_*"),
    "QNAP": ("@recycle", "@recently-snapshot", ".@__thumb", "@__thumb"),
    "Buffalo": ("trashbox",),
    "Lightroom": ("*.lrdata",),
    "Capture One": ("captureone", "*.cocatalog"),
    "digiKam": (".dtrash",),
    "Picasa": (".picasaoriginals", "picasa.ini"),
    "Syncthing": (".stversions",),
    "Nextcloud": ("appdata_*",),
    "Sony cameras": ("m4root/thmbnl",),
}
# Formats that training does not read; prepare_data.py --mode validate reports why for each of the first.
OTHER_IMAGES = (
    ".heic", ".heif", ".jxl", ".jp2", ".svg", ".pdf", ".psd", ".psb", ".xcf", ".ico", ".exr", ".hdr", ".tga",
)  # fmt: skip
RAW = (
    ".nef", ".nrw", ".cr2", ".cr3", ".crw", ".arw", ".sr2", ".dng", ".orf", ".rw2", ".raf", ".pef", ".srw",
    ".3fr", ".iiq", ".x3f", ".gpr",
)  # fmt: skip
VIDEOS = (".mov", ".mp4", ".m4v", ".avi", ".mkv", ".webm", ".mts", ".m2ts", ".3gp", ".wmv")
KINDS = {"raw_file": RAW, "video": VIDEOS, "other_image": OTHER_IMAGES}  # the codes of what is skipped

_PATTERNS = (re.escape(name).replace(r"\*", "[^/]*") for names in NAMES.values() for name in names)
_OTHERS = re.compile(f"(?:^|/)(?:{'|'.join(_PATTERNS)})(?:/|$)", re.IGNORECASE)
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?(?:/|$))")


def code_of(path: str) -> str | None:
    """`system` or `hidden` for a relative path that is not for users, or is below such a folder."""
    if _OTHERS.search(path):
        return "system"
    return "hidden" if _HIDDEN.search(path) else None


def remedy_for(name: str) -> str:
    """What makes a file of another format readable."""
    extension = os.path.splitext(name)[1].lower()
    packages = [package for kind, (_, package) in PLUGINS.items() if extension in EXTENSIONS_OF[kind]]
    return "".join(f"run pip install {package}, or " for package in packages) + "convert them to PNG or JPEG"
