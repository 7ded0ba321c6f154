"""Files we do not open, and what to do about them."""

import re
import shlex
from pathlib import Path

from lydite.core.errors import FileError, at


def refuse_other_formats(path: Path) -> None:
    """Raise a FileError with a way out when the suffix of `path` is of a format we do not open."""
    reason = _SUFFIXES.get(path.suffix.lower())
    if reason is not None:
        files = {"source": path, "target": path.with_suffix(".safetensors")}
        quoted = {key: shlex.quote(at(file)) for key, file in files.items()}
        raise FileError(f"{at(path)}: {reason % quoted}")


def recognize(start: bytes) -> str | None:
    """What a file that is not safetensors turns out to be by its first bytes, and what to do."""
    if start[8:9] == b"{":  # a header does begin here; it is broken safetensors
        return None
    return next((kind for magic, kind in _CONTENTS if re.match(magic, start)), None)


_PICKLE = (
    "pickle files can run code when opened, so they are never read here. Convert it to safetensors"
    ' on a machine you trust: python -c "import sys, torch, safetensors.torch as s;'
    " d = torch.load(sys.argv[1], map_location='cpu', weights_only=True);"
    " d = d.get('state_dict', d);"
    " s.save_file({k: v.clone().contiguous() for k, v in d.items() if torch.is_tensor(v)},"
    ' sys.argv[2])" %(source)s %(target)s'
)
_NUMPY = (
    "NumPy files are not read here. Convert it to safetensors:"
    ' python -c "import sys, numpy, safetensors.numpy as s; d = numpy.load(sys.argv[1]);'
    " s.save_file(dict(d) if hasattr(d, 'files') else {'array': d}, sys.argv[2])"
    '" %(source)s %(target)s'
)
_GGUF = "GGUF files are not read here. Get the safetensors files of the model it was made from."
_SUFFIXES: dict[str, str] = {".npz": _NUMPY, ".npy": _NUMPY, ".gguf": _GGUF}
_SUFFIXES.update(dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLE))

# What files named .safetensors turn out to be, by their first bytes.
_CONTENTS = (
    (rb"version https://git-lfs", "a Git LFS pointer. Fetch the file it stands for: git lfs pull"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a pickle or zip file. Get the model's safetensors files"),
    (rb"GGUF|\x93NUMPY", "a GGUF or NumPy file. Get the model's safetensors files"),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page. Log in where it came from, download it again"),
)
