"""`lydite inspect`: what is in a checkpoint, without reading tensor data."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.request_options import revision_option, with_revision

if TYPE_CHECKING:
    from lydite.core.checkpoint import Checkpoint
    from lydite.weights.inspect import Branch

ENDINGS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth")  # all but the first are refused by name

# How a model can be loaded: title, precision, bits.
LOADING = (
    ("float32", "float32", None),
    ("bfloat16", "bfloat16", None),
    ("--bits 8", "bfloat16", 8),
    ("--bits 4", "bfloat16", 4),
)


@click.command("inspect")
@click.argument("model")
@revision_option
@click.option(
    "--depth",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Levels of the tree to print.",
)
@click.option("--all", "everything", is_flag=True, help="Every tensor with its shape and dtype.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(model: str, revision: str | None, depth: int, everything: bool, as_json: bool) -> None:
    """Show names, shapes, dtypes and sizes of a checkpoint. Only headers are read.

    MODEL is a .safetensors file, a shard index, a folder with weights, a whole pipeline folder, or
    a hub id, of any architecture. Of models that lydite runs it also shows how much memory their
    weights take, together and with --low-memory. Exit status 2: the file breaks a rule of the
    format; the message names the file, the tensor and the rule.

    \b
    lydite inspect model.safetensors --all
    lydite inspect sd3-folder/ --depth 3
    lydite inspect sd3-folder/ --json | jq '.parts.vae.parameters'
    """
    from lydite.core.checkpoint import open_checkpoint
    from lydite.pipelines.model_files import locate
    from lydite.weights.inspect import MAX_DEPTH

    parts: dict[str, Any] = {}
    located = locate(with_revision(model, revision))
    for name, path in _weights(located).items():
        with open_checkpoint(path) as checkpoint:
            if as_json:
                parts[name] = _plain(checkpoint)
            else:
                _print(name, checkpoint, MAX_DEPTH if everything else depth)
    memory = _memory(located)
    if as_json:
        click.echo(json.dumps({"model": model, "parts": parts, "memory": memory}, indent=1))
    elif memory:
        _print_memory(memory)


def _memory(path: Path) -> dict[str, dict[str, Any]]:
    """Bytes of each network, of all and of the largest, by how the model is loaded."""
    from lydite.core.errors import LyditeError
    from lydite.pipelines.memory import weights_in_memory
    from lydite.pipelines.model_files import find_components

    try:
        components = find_components(path)
    except LyditeError:
        return {}  # not a model of ours
    memory: dict[str, dict[str, Any]] = {}
    for title, dtype, bits in LOADING:
        sizes = weights_in_memory(components, dtype, bits)
        memory[title] = {
            "networks": dict(sizes.weights),
            "together": sizes.together,
            "low_memory": sizes.in_turn,
        }
    return memory


def _print_memory(memory: dict[str, dict[str, Any]]) -> None:
    click.secho("weights in memory", bold=True)
    click.echo(f"  {'':<24}" + "".join(f"{title:>12}" for title in memory))
    columns = list(memory.values())
    rows = {
        name: [column["networks"][name] for column in columns] for name in columns[0]["networks"]
    }
    rows |= {
        "together": [column["together"] for column in columns],
        "with --low-memory": [column["low_memory"] for column in columns],
    }
    for name, sizes in rows.items():
        click.echo(f"  {name:<24}" + "".join(f"{_size(size):>12}" for size in sizes))


def _weights(path: Path) -> dict[str, Path]:
    """The checkpoint itself, or each weight-bearing folder of a pipeline."""
    own = any(file for end in ENDINGS for file in path.glob(f"*{end}"))
    if (path / "model_index.json").is_file() or (path.is_dir() and not own):
        folders = sorted({file.parent for end in ENDINGS for file in path.glob(f"*/*{end}")})
        if folders:
            return {folder.name: folder for folder in folders}
    return {os.path.basename(os.path.realpath(path)): path}


def _plain(checkpoint: "Checkpoint") -> dict[str, Any]:
    tensors = checkpoint.tensors.values()
    return {
        "files": [str(file) for file in checkpoint.files],
        "parameters": sum(info.size for info in tensors),
        "nbytes": sum(info.nbytes for info in tensors),
        "tensors": [
            {"name": info.name, "dtype": info.dtype, "shape": info.shape, "nbytes": info.nbytes}
            for info in tensors
        ],
    }


def _print(name: str, checkpoint: "Checkpoint", depth: int) -> None:
    from lydite.weights.inspect import tree

    root = tree(checkpoint.tensors)
    files = f", {len(checkpoint.files)} files" if len(checkpoint.files) > 1 else ""
    click.secho(f"{name}  {_summary(root)}{files}", bold=True)
    _print_children(root, 1, depth)


def _print_children(branch: "Branch", level: int, depth: int) -> None:
    for child in branch.children.values():
        start = f"{'  ' * level}{child.name:<24}"
        if child.leaf:
            info = child.leaf
            click.echo(f"{start} {info.dtype:<5} {list(info.shape)}  {_size(info.nbytes)}")
        if child.children:
            click.echo(f"{start} {_summary(child)}")
            if level < depth:
                _print_children(child, level + 1, depth)


def _summary(branch: "Branch") -> str:
    dtypes = ", ".join(f"{name}×{count}" for name, count in sorted(branch.dtypes.items()))
    noun = "tensor" if branch.tensors == 1 else "tensors"
    size = _size(branch.nbytes)
    values = "values, in U32 several weights each" if "U32" in branch.dtypes else "parameters"
    return f"{branch.tensors} {noun}, {branch.parameters:,} {values}, {size} ({dtypes})"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
