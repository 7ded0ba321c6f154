"""Every family, by the pipeline class a checkpoint names.

Other packages add families by an entry point of the group `lydite.families` that names a `Family`.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points

from lydite.core.errors import ConfigError, shown
from lydite.pipelines.family import Family
from lydite.pipelines.model import Kind

BUILT_IN = ("sd3", "flux", "qwen_image")  # modules of this package


def families() -> Iterator[Family]:
    """Each family, imported when it is reached."""
    for name in BUILT_IN:
        yield import_module(f"{__name__}.{name}").FAMILY
    for point in entry_points(group="lydite.families"):
        yield point.load()


def find_family(class_name: object, where: object) -> Family:
    """The family of a pipeline class, as model_index.json names it."""
    known: list[str] = []
    for family in families():
        if class_name in family.pipelines:
            return family
        known.append(f"{family.title} ({', '.join(sorted(family.pipelines))})")
    raise ConfigError(
        f"{where}: the pipeline class is {shown(class_name)}; supported are {'; '.join(known)}."
    )


def all_kinds() -> dict[str, Kind]:
    """The network classes of every family."""
    return {name: kind for family in families() for name, kind in family.kinds.items()}
