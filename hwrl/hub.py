"""Names on the Hugging Face hub: :func:`is_on_hub`, and of models :func:`model_directory` and :func:`pin`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from hwrl.errors import ConfigError, message_of

HUB = "hf:"
"""A path that begins with this is a name on the hub."""

_NAME = re.compile(rf"(?:{HUB})?(?P<name>\w[\w.-]*/\w[\w.-]*)(?:\?revision=(?P<revision>[\w./-]+))?")
_READ = [f"*.{suffix}" for suffix in ("json", "txt", "model", "tiktoken", "jinja", "safetensors")]
"""What hwrl reads of a model: no code, and no weights in other formats."""
_FOLDERS = ["[!a]*/*", "a[!d]*/*"]  # without additional_chat_templates; a star matches slashes, too


def is_on_hub(path: Path | str) -> bool:
    """Return whether ``path`` is the name of a model or a data set on the hub, and no path of a file."""
    return str(path).startswith(HUB)


def model_name(value: str) -> Path | None:
    """Return a model's name on the hub as ``hf:OWNER/NAME``, with ``?revision=…`` or not; None if it is a directory's.

    As in transformers, a directory of this name comes first.

    >>> model_name("Qwen/Qwen3-0.6B?revision=main")
    PosixPath('hf:Qwen/Qwen3-0.6B?revision=main')
    >>> model_name("models/qwen/3")
    """
    if is_on_hub(value) or (_NAME.fullmatch(value) and not Path(value).exists()):
        return Path(HUB + value.removeprefix(HUB))
    return None


@functools.cache
def model_directory(path: Path, *, weights: bool = True) -> Path:
    """Return the directory of the model ``path``: ``path`` itself, or the local copy of a model on the hub.

    Blocks while what the hub's cache lacks is downloaded, by one of the processes of a host. Without a network, a
    complete copy in the cache serves. Without ``weights``, the weight files may be missing. Raises ConfigError.
    """
    if not is_on_hub(path):
        return path
    if (match := _NAME.fullmatch(str(path))) is None:
        raise ConfigError(f"{path} names no model", why="it has another form", fix="write OWNER/NAME?revision=REVISION")
    from huggingface_hub import snapshot_download

    name, revision = match["name"], match["revision"]
    ignored = _FOLDERS if weights else [*_FOLDERS, "*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_READ, ignore_patterns=ignored))
    except Exception as exc:  # of the hub, of the cache's disk, and of the library that carries the requests
        raise ConfigError(
            f"there is no model {name}: no such directory, and no complete copy from the hub",
            why=" ".join(message_of(exc).split()),
            fix=f"correct the name; where there is a network: hf download {name}"
            f"{f' --revision {revision}' if revision else ''} (the copy is under HF_HOME; log in with hf auth login)",
        ) from exc


def pin(path: Path) -> Path:
    """Return ``path`` with the commit of its local copy as its revision, if it is a name on the hub."""
    if not is_on_hub(path):
        return path
    return Path(f"{str(path).partition('?')[0]}?revision={model_directory(path).name}")
