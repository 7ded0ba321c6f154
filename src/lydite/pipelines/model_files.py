"""Where a model is, and which networks it holds: a pipeline folder, a component's folder, a file.

Only configs and headers are read here.
"""

import difflib
import re
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lydite import embedded
from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config, read_json
from lydite.core.errors import ConfigError, FileError, at, shown
from lydite.core.tensorfile import TensorInfo
from lydite.pipelines.family import Defaults, Family, families, find_family, network_classes
from lydite.pipelines.inferred_models import InferredModel
from lydite.pipelines.model import Component, Model, folder_component
from lydite.weights.audit import Finding, Ledger

# The folders of a pipeline, weights as safetensors only: no pickles, no second copy in one file.
WANTED = ("model_index.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model")
UNWANTED = ("*.fp16.*", "*.bf16.*", "text_encoders/*")
# owner/name, or owner/name@revision; as in git, `..` is no part of a revision
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@(?!.*\.\.)[\w./-]+)?")
_FILES = (".safetensors", ".sft", ".json", ".bin", ".ckpt", ".pt", ".pth", ".pkl", ".gguf", ".npz")


def locate(model: str, *, fetch: bool = True) -> Path:
    """The local path of a model given as a folder, a file or a hub id (`owner/name@revision`).

    Without `fetch` a hub id is found only if it was downloaded before: a name that comes from a
    file must not decide what is downloaded.
    """
    if model == embedded.NAME:
        return embedded.MODEL
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown user, a null
        raise FileError(f"{shown(model)}: {error}.") from error
    if not _HUB_ID.fullmatch(model) or path.suffix.lower() in _FILES:
        close = difflib.get_close_matches(model, [embedded.NAME], cutoff=0.8)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise FileError(
            f"{shown(model)[1:-1]}: no such file or folder. {hint}Expected a diffusers folder, "
            "a .safetensors file, or a hub id such as owner/name."
        )
    return _download(model, fetch)


def _download(model: str, fetch: bool) -> Path:
    """The folder in the hub's own cache. An interrupted download resumes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = model.partition("@")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(WANTED),
                ignore_patterns=list(UNWANTED),
                local_files_only=not fetch,
                tqdm_class=_progress_bar(),
            )
        )
    except Exception as error:  # of the hub, the network, the disk: they have no common class
        if not fetch:
            raise FileError(
                f"{model}: not downloaded yet, and a name in a file decides no download. Name it "
                "with --model."
            ) from error
        if isinstance(error, GatedRepoError):
            what = "a gated model. Accept its licence on the hub and run `hf auth login`"
        elif isinstance(error, RevisionNotFoundError):
            what = f"the model on the hub has no revision {revision}"
        elif isinstance(error, RepositoryNotFoundError):
            what = "neither a folder here nor a public model on the hub"
        else:
            what = "not found here, and the download from the hub failed. The same command resumes"
        reason = textwrap.shorten(str(error), 160, placeholder=" …")
        raise FileError(f"{model}: {what}. The hub's error: {reason}") from error


def _progress_bar() -> Any:
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """Draws where control characters are allowed, and shows no name that has any."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            stream = getattr(sys.stderr, "unescaped", sys.stderr)
            options |= {"file": stream, "disable": not stream.isatty()}
            if not str(options.get("desc") or "").isprintable():
                options["desc"] = None
            super().__init__(*arguments, **options)

    return Bar


INDEX = "model_index.json"
# How the names of classes end that are no networks, or that only judge a finished picture.
NOT_RUN = (
    *("Scheduler", "Tokenizer", "TokenizerFast"),
    *("ImageProcessor", "FeatureExtractor", "SafetyChecker"),
)
DEFAULTS = "lydite.json"  # how one checkpoint is meant to be run, where its family's way is wrong


def open_model(
    path: Path,
    extra: Path | None = None,
    *,
    dtype: str = "float32",
    low_memory: bool = False,
    bits: int | None = None,
) -> tuple[Family, Model, Defaults]:
    """Find every part of the checkpoint at `path`; parts it lacks come from the folder `extra`.

    Where `path` is one component, `extra` is the pipeline, and the component replaces its own.
    """
    alone = _is_component(path)
    if alone and extra is None:
        raise FileError(
            f"{path}: one component of a pipeline. Name the pipeline's folder with --components "
            "FOLDER."
        )
    home = extra if alone and extra else path
    family = _family(home)
    components = find_components(path)
    if leftovers := _leftovers(path):
        leftovers.require_clean()
    if extra:
        others = find_components(extra)
        components = _replacing(components, others, path, extra) if alone else components
        components = {**others, **components}
    if missing := [name for name in family.required if name not in components]:
        raise _missing(path, ", ".join(missing))
    folders = [folder for folder in (path, extra) if folder and folder.is_dir()]
    tokenizers = {
        encoder: (_tokenizer_folder(folders, encoder, path), load_tokenizer)
        for encoder, load_tokenizer in family.tokenizers.items()
        if encoder in components
    }
    family.check_components(path, components)
    index = next((read_json(each / INDEX) for each in folders if (each / INDEX).exists()), {})
    variant = family.variant_of(components, index)
    config = home / "scheduler" / "scheduler_config.json"
    scheduler = variant.scheduler
    if (home / INDEX).is_file():
        scheduler = read_json(config, infinity=True)  # diffusers writes it
    model = Model(home, components, scheduler, tokenizers, dtype, low_memory, bits)
    return family, model, _defaults(home, variant.defaults)


def _is_component(path: Path) -> bool:
    """Whether a path is one component's folder, or a file of weights beside its config."""
    if path.is_dir():
        return (path / "config.json").exists() and not (path / INDEX).exists()
    return (path.parent / "config.json").exists() and _layout(path) is None


def _replacing(
    own: dict[str, Component], others: dict[str, Component], path: Path, extra: Path
) -> dict[str, Component]:
    """One component, under the name of that of a pipeline which it replaces.

    It goes by the name of its folder; where that is another, by its class.
    """
    (component,) = own.values()
    twins = [name for name, other in others.items() if other.kind is component.kind]
    if component.name in others:
        return own
    if len(twins) == 1:
        return {twins[0]: replace(component, name=twins[0])}
    raise ConfigError(
        f"{path}: its folder is named {component.name}; {extra} has {', '.join(others)}. Name the "
        "folder as the component that it replaces."
    )


def find_components(path: Path) -> dict[str, Component]:
    """Every network of a checkpoint, whichever of the four forms it has."""
    if (path / INDEX).exists():
        return _pipeline_components(path)
    if (path / "config.json").exists():
        component = folder_component(path, network_classes())
        return {component.name: component}
    if layout := _layout(path):
        return layout[1].components(path)
    if path.is_dir():
        raise _missing_index(path) or FileError(
            f"{path}: neither {INDEX} (a pipeline) nor config.json (a component) is here, "
            f"nor {_folders()}."
        )
    if (path.parent / "config.json").exists():
        component = folder_component(path.parent, network_classes(), weights=path)
        return {component.name: component}
    raise _unknown_file(path)


def audit_leftovers(path: Path) -> Ledger | None:
    """What lies outside every network: tensors of a single file; networks that an index omits."""
    ledger = _unnamed_networks(path) if (path / INDEX).is_file() else _leftovers(path)
    if ledger is None or ledger == Ledger(ledger.where):
        return None
    return ledger


def _unnamed_networks(folder: Path) -> Ledger:
    """Networks that a pipeline needs, or that lie there, and model_index.json does not name."""
    named = find_components(folder)
    class_name = read_json(folder / INDEX).get("_class_name")
    unchecked: list[Finding] = []
    missing: list[Finding] = []
    try:
        required = find_family(class_name, folder / INDEX).required
        reason = f"{INDEX} does not name it, and the pipeline needs it"
        missing = [Finding(name, reason) for name in required if name not in named]
    except ConfigError:
        reason = f"the networks that a pipeline of class {shown(class_name)} needs are not known"
        unchecked.append(Finding(INDEX, reason))
    for path in sorted({file.parent for file in folder.glob("*/*.safetensors")}):
        if path.name not in named:
            reason = f"{at(Path(path.name))}/ holds weights that {INDEX} does not name"
            unchecked.append(Finding(f"{path.name}/", reason))
    return Ledger(f"{folder}", missing=tuple(missing), undecidable=tuple(unchecked))


def _leftovers(path: Path) -> Ledger | None:
    has_config = (path / INDEX).exists() or (path / "config.json").exists()
    layout = None if has_config else _layout(path)
    return layout[1].audit_leftovers(path) if layout else None


def _family(path: Path) -> Family:
    index = path / INDEX
    if index.exists():
        return find_family(read_json(index).get("_class_name"), index)
    if layout := _layout(path):
        return layout[0]
    if path.is_dir():
        raise _missing_index(path) or FileError(
            f"{path}: no {INDEX} here; expected a whole pipeline in diffusers' layout, "
            f"or {_folders()}."
        )
    raise _unknown_file(path)


def _missing_index(folder: Path) -> FileError | None:
    """The error for a folder whose components have configs: a pipeline without its index."""
    if not (names := _with_configs(folder)):
        return None
    return FileError(
        f"{folder}: {INDEX} is missing, though {', '.join(names)} have their config.json. Copy it "
        "from where they came from."
    )


def _with_configs(folder: Path) -> list[str]:
    """The folders in it that are components as diffusers saves them; other programs save none."""
    return sorted(file.parent.name for file in folder.glob("*/config.json"))


def _layout(path: Path) -> tuple[Family, InferredModel] | None:
    """The family and layout of a file or folder without configs."""
    if path.is_dir() and _with_configs(path):
        return None
    names: dict[str, TensorInfo] = {}
    if not path.is_dir():
        with open_checkpoint(path) as checkpoint:
            names = dict(checkpoint.tensors)
    for family in families():
        for layout in family.inferred:
            if layout.in_folders == path.is_dir() and layout.matches(names or layout.tensors(path)):
                return family, layout
    return None


def _folders() -> str:
    titles = [each.title for family in families() for each in family.inferred if each.in_folders]
    return f"tensor names of {', '.join(titles)} in its folders"


def _unknown_file(path: Path) -> ConfigError:
    layouts = [each for family in families() for each in family.inferred]
    titles = [each.title for each in layouts if not each.in_folders]
    with open_checkpoint(path) as checkpoint:
        names = shown(sorted(checkpoint.tensors)[:3])
    return ConfigError(
        f"{path}: no network we know. Expected tensor names of {', '.join(titles)} in one file, "
        f"found {names}. A component's file needs its config.json beside it."
    )


def _pipeline_components(folder: Path) -> dict[str, Component]:
    """The networks named in a pipeline folder's model_index.json."""
    path = folder / INDEX
    index = read_json(path)
    kinds = network_classes(index.get("_class_name"))
    components: dict[str, Component] = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            continue  # a setting, not a component
        class_name = str(entry[-1]) if entry else "None"
        if class_name in kinds:
            if not name.isidentifier():
                raise ConfigError(f"{path}: {name!r} is not a folder's name.")
            components[name] = folder_component(folder / name, kinds, name, class_name=class_name)
        elif class_name != "None" and not class_name.endswith(NOT_RUN):
            raise ConfigError(
                f"{path}: {name} is a {class_name}; supported are {', '.join(sorted(kinds))}."
            )
    if not components:
        raise ConfigError(f"{path}: names no network.")
    return components


def _tokenizer_folder(folders: list[Path], encoder: str, path: Path) -> Path:
    name = encoder.replace("text_encoder", "tokenizer")
    for folder in folders:
        if (folder / name).is_dir():
            return folder / name
    raise _missing(path, name)


def _missing(path: Path, names: str) -> FileError:
    return FileError(
        f"{path}: has no {names}. Name a diffusers folder that has with --components FOLDER."
    )


def _defaults(path: Path, defaults: Defaults) -> Defaults:
    """The family's, or what the checkpoint's own file says instead."""
    own = path / DEFAULTS
    if not own.is_file():
        return defaults
    return read_config(Defaults, {**asdict(defaults), **read_json(own)}, where=own)
