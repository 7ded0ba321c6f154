"""Where a model named on the command line is: in the package, on disk, or on the hub."""

import re
from pathlib import Path

from lydite import embedded
from lydite.core.errors import FileError, shown

# The folders of a pipeline, weights as safetensors only: no pickles, no second copy in one file.
WANTED = ("model_index.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model")
UNWANTED = ("*.fp16.*", "*.bf16.*", "text_encoders/*")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def locate(model: str) -> Path:
    """The local path of a model given as a folder, a file or a hub id (`owner/name`)."""
    if model == embedded.NAME:
        return embedded.MODEL
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, a user who is not there
        raise FileError(f"{shown(model)}: {error}.") from error
    if not _HUB_ID.fullmatch(model) or path.suffix:
        raise FileError(
            f"{model}: no such file or folder. Expected a diffusers folder, "
            "a .safetensors file, or a hub id such as owner/name."
        )
    return _download(model)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                repository, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        if isinstance(error, GatedRepoError):
            what = "a gated model. Accept its licence on the hub and run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            what = "neither a folder here nor a public model on the hub"
        else:
            what = "not found here, and the download from the hub failed"
        reason = " ".join(str(error).split())[:160]
        raise FileError(f"{repository}: {what}. The hub's error: {reason}") from error
