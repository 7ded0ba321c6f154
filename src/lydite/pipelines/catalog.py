"""Which networks a checkpoint holds: a pipeline folder, a component's folder, or a single file.

Nothing is read here but configs and headers.
"""

from pathlib import Path

from lydite.core.checkpoint import open_checkpoint
from lydite.core.errors import ConfigError, FileError
from lydite.core.jsonfile import read_json
from lydite.pipelines import single_file
from lydite.pipelines.components import KINDS, Component, folder_component


def pipeline_components(folder: Path) -> dict[str, Component]:
    """The networks named in a pipeline folder's model_index.json."""
    index = read_json(folder / "model_index.json")
    components: dict[str, Component] = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            continue  # a setting, not a component
        class_name = str(entry[-1]) if entry else "None"
        if class_name in KINDS:
            if not name.isidentifier():
                raise ConfigError(
                    f"{folder / 'model_index.json'}: {name!r} is not a folder's name."
                )
            components[name] = folder_component(folder / name, name, class_name=class_name)
        elif class_name != "None" and not _has_no_weights(class_name):
            raise ConfigError(
                f"{folder / 'model_index.json'}: {name} is a {class_name}; "
                f"supported are {', '.join(sorted(KINDS))}."
            )
    if not components:
        raise ConfigError(f"{folder / 'model_index.json'}: names no network.")
    return components


def find_components(path: Path) -> dict[str, Component]:
    """Every network of a checkpoint, whichever of the three forms it has."""
    if path.is_dir():
        if (path / "model_index.json").exists():
            return pipeline_components(path)
        if (path / "config.json").exists():
            component = folder_component(path)
            return {component.name: component}
        raise FileError(
            f"{path}: neither model_index.json (a pipeline) nor config.json (a component) is here."
        )
    with open_checkpoint(path) as checkpoint:
        alone = not single_file.is_single_file(checkpoint.tensors)
    if alone and (path.parent / "config.json").exists():
        component = folder_component(path.parent, weights=path)
        return {component.name: component}
    return single_file.components(path)


def _has_no_weights(class_name: str) -> bool:
    return class_name.endswith(("Scheduler", "Tokenizer", "TokenizerFast", "ImageProcessor"))
