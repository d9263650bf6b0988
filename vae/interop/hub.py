"""VAEs on the Hugging Face hub, OWNER/REPO[:PATH] or an address: downloads.

The package huggingface_hub is imported when it is needed. It finds the user's token and its cache by itself,
and obeys HF_HUB_OFFLINE and HF_ENDPOINT.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vae.system import console
from vae.system.errors import UserError

_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]*\w"
_NAME = re.compile(rf"({_REPO})(?::([^:]+))?")
# This matches the address of a page or of a file. A Path keeps only one of the two slashes.
_ADDRESS = re.compile(
    rf"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/({_REPO})"
    r"(?:/(?:blob|resolve|tree|raw)/([^/?#]+)(?:/([^?#]*))?)?/?(?:[?#].*)?"
)
_FILES = (".safetensors", ".sft", ".pt", ".ckpt", ".bin", ".pth")
_OTHER_FILES = (".pkl", ".gguf", ".png", ".jpg")
_IN_FOLDER = "diffusion_pytorch_model"  # files with names like this need the config.json beside them
_LOGIN = "log in with: hf auth login"
INSTALL = "python -m pip install huggingface_hub"


def hub_name(path: Path) -> tuple[str, str, str] | None:
    """OWNER/REPO, the path in it and the revision ("": the newest), if `path` can be on the hub.

    It cannot if its first folder is on this machine: then it is a mistyped path, and the hub is not asked.
    """
    if address := _ADDRESS.fullmatch(path.as_posix()):
        return address[1], unquote(address[3] or "").strip("/"), unquote(address[2] or "")
    match = _NAME.fullmatch(path.as_posix())
    if match is None or match[1].endswith((*_FILES, *_OTHER_FILES)) or os.path.exists(path.parts[0]):
        return None
    return match[1], (match[2] or "").strip("/"), ""


@cache  # the checks before the start, and the reading of the weights, see the same files
def download(repo: str, inside: str, revision: str, names: tuple[str, ...], where: str) -> Path:
    """The local copy of a VAE in the repository: a folder with one of the weights `names`, or one file.

    `inside` is a folder or a file of weights in the repository; "": its root, or vae/ as in a pipeline.
    Raises UserError that starts with `where`.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            f"{where}: there is no such file or folder; for the repository of the Hugging Face hub, run "
            f"{INSTALL}, or give the folder of: hf download {repo} --local-dir FOLDER"
        )
    hub = _package()
    fetch = partial(hub.hf_hub_download, repo, revision=revision or None)
    folder, _, name = f"/{inside}".rpartition("/")
    if name.startswith(_IN_FOLDER):
        names = (name,)
        inside = folder.strip("/")
        folders = [inside]
    else:
        folders = [inside] if inside else ["", "vae"]
    with _one_line(where):
        if inside.endswith(_FILES):
            return _shown(Path(fetch(inside)), repo)
        wanted = [(folder, name) for folder in folders for name in names]
        if first := _first(fetch, wanted):
            folder, weights = first
            fetch(f"{folder}/config.json".lstrip("/"))
            return _shown(weights if len(names) == 1 else weights.parent, repo)
    places = " or ".join(f"{folder}/{names[0]}".lstrip("/") for folder in folders)
    raise UserError(f"{where}: the repository has no {places}: add :PATH of a folder or .safetensors file")


def _package() -> Any:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return huggingface_hub


def _first(fetch: Callable[..., str], wanted: list[tuple[str, str]]) -> tuple[str, Path] | None:
    """The first of the files (folder, name) that the repository has, with its folder."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = None
    for folder, name in wanted:
        try:
            path = fetch(f"{folder}/{name}".lstrip("/"), local_files_only=unreachable is not None)
            return folder, Path(path)
        except LocalEntryNotFoundError as error:  # the others may be in the cache
            unreachable = unreachable or error
        except EntryNotFoundError:
            continue
    if unreachable is not None:
        raise unreachable
    return None


def _shown(path: Path, repo: str) -> Path:
    commit = next((part for part in reversed(path.parts) if re.fullmatch(r"[0-9a-f]{40}", part)), "")
    console.info(f"{repo}: commit {commit[:12]} of the Hugging Face hub, in {path}")
    return path


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Errors of huggingface_hub as a UserError that starts with `where`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        reason = f"the repository is gated: accept its terms on its page, and {_LOGIN}"
    # These are no access, no such file or name, no connection, and a full disk.
    except (errors.HfHubHTTPError, errors.HTTPError, ValueError, OSError) as error:
        reason = f"there is no such file or folder, and {_reason(error)}"
    else:
        return
    raise UserError(f"{where}: {reason}") from None


def _reason(error: Exception) -> str:
    """Return what went wrong on the hub or on the way to it, with the remedy."""
    from huggingface_hub import errors

    # The cause says why the hub gave nothing, before the cache was searched.
    is_local = isinstance(error, errors.LocalEntryNotFoundError)
    cause = (error.__cause__ or error) if is_local else error
    text = " ".join(str(cause).split())
    response = getattr(cause, "response", None)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "it is not in the cache of the hub: unset HF_HUB_OFFLINE to download it"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"the hub has no such public repository: correct it, or {_LOGIN}"
    if isinstance(cause, errors.RevisionNotFoundError):
        return "the repository has no such revision: correct it"
    if response is None and (is_local or isinstance(cause, errors.HTTPError)):
        return f"the hub cannot be reached ({text}): check the network, and HF_ENDPOINT if it is set"
    if isinstance(cause, errors.EntryNotFoundError):
        return "the repository has no such file: correct the path in it"
    if getattr(response, "status_code", 0) in (401, 403):
        return f"the hub refuses access ({text}): {_LOGIN}"
    return f"{type(cause).__name__}: {text}"
