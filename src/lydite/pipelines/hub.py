"""Where a model named on the command line is: a path, or a repository of the Hugging Face hub."""

import re
from pathlib import Path

from lydite.core.errors import FileError

# Weights as safetensors only, with the small files beside them; pickles are never downloaded.
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(model: str) -> Path:
    """The local path of a model given as a folder, a file or a hub id (`owner/name`)."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(model) or path.suffix:
        raise FileError(
            f"{model}: no such file or folder. Expected a diffusers folder, "
            "a .safetensors file, or a hub id such as owner/name."
        )
    return _download(model)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise FileError(
            f"{repository}: neither a local path nor to be had from the hub ({reason}). "
            "A gated model needs `hf auth login` and its licence accepted."
        ) from error
