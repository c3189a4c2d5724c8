"""Files with the tensors of a call, as they come with a report of a bug: npz, safetensors, and torch's own.

None is read with pickle. Scalars among the tensors, such as ``causal`` or ``softmax_scale``, are facts of the call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reference.formats import FORMATS

_SAFETENSORS = {  # dtypes of its format by their names there
    "F32": np.float32,
    "F16": np.float16,
    "BF16": FORMATS["bf16"].dtype,
    "F8_E4M3": FORMATS["e4m3"].dtype,
    "I64": np.int64,
    "I32": np.int32,
    "BOOL": np.bool_,
}


def load(path: Path) -> dict[str, object]:
    """Return the tensors of a file by name.

    Parameters
    ----------
    path : Path
        Its suffix says what it is: .npz, .safetensors, or .pt of torch.

    Returns
    -------
    dict of str to array
        Numpy arrays, or torch tensors of a .pt; scalars as numbers, texts or booleans of Python.

    Raises
    ------
    ValueError
        For another suffix, a file that needs pickle, and a format of numbers that attention does not have.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            found: Any = dict(file)
    elif path.suffix == ".safetensors":
        found = _safetensors(path)
    elif path.suffix in (".pt", ".pth"):
        from fa3verify.tensors.convert import stored

        found = stored(path)
    else:
        raise ValueError(f"{path} must end in .npz, .safetensors or .pt")
    return {name: x.item() if getattr(x, "ndim", 1) == 0 else x for name, x in found.items()}


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the format: a length of eight bytes, a header in JSON, and the tensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, each in header.items():
        if each["dtype"] not in _SAFETENSORS:
            raise ValueError(f"{name} in {path} must be of {', '.join(_SAFETENSORS)}, got {each['dtype']}")
        low, high = (start + at for at in each["data_offsets"])
        tensors[name] = np.frombuffer(data[low:high], _SAFETENSORS[each["dtype"]]).reshape(each["shape"])
    return tensors
