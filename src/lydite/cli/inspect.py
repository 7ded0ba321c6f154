"""`lydite inspect`: what is in a checkpoint, without reading tensor data."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lydite.core.checkpoint import Checkpoint
    from lydite.weights.inspect import Branch


@click.command("inspect")
@click.argument("model")
@click.option("--depth", default=2, show_default=True, help="Levels of the tree to print.")
@click.option("--all", "everything", is_flag=True, help="Every tensor with its shape and dtype.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(model: str, depth: int, everything: bool, as_json: bool) -> None:
    """Show names, shapes, dtypes and sizes of a checkpoint. Only headers are read.

    MODEL is a .safetensors file, a shard index, a folder with weights, a whole pipeline folder, or
    a hub id. Any architecture will do. Exit status 2 means the file breaks a rule of the format;
    the message names the file, the tensor and the rule.

    \b
    lydite inspect model.safetensors --all
    lydite inspect sd3-folder/ --depth 3
    lydite inspect sd3-folder/ --json | jq '.parts.vae.parameters'
    """
    from lydite.core.checkpoint import open_checkpoint
    from lydite.pipelines.hub import locate

    parts: dict[str, Any] = {}
    for name, path in _weights(locate(model)).items():
        with open_checkpoint(path) as checkpoint:
            if as_json:
                parts[name] = _plain(checkpoint)
            else:
                _print(name, checkpoint, 99 if everything else depth)
    if as_json:
        click.echo(json.dumps({"model": model, "parts": parts}, indent=1))


def _weights(path: Path) -> dict[str, Path]:
    """The checkpoint itself, or each weight-bearing folder of a pipeline."""
    if path.is_dir() and (path / "model_index.json").exists():
        folders = sorted(child for child in path.iterdir() if child.is_dir())
        found = {child.name: child for child in folders if any(child.glob("*.safetensors"))}
        if found:
            return found
    return {path.name: path}


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
        indent = "  " * level
        if child.leaf and not child.children:
            info = child.leaf
            click.echo(f"{indent}{child.name:<24} {info.dtype:<5} {list(info.shape)}")
            continue
        click.echo(f"{indent}{child.name:<24} {_summary(child)}")
        if level < depth:
            _print_children(child, level + 1, depth)


def _summary(branch: "Branch") -> str:
    dtypes = ", ".join(f"{name}×{count}" for name, count in sorted(branch.dtypes.items()))
    noun = "tensor" if branch.tensors == 1 else "tensors"
    size = _size(branch.nbytes)
    return f"{branch.tensors} {noun}, {branch.parameters:,} parameters, {size} ({dtypes})"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
