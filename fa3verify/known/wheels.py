"""The peers' folder made from wheels: the one library of each that a peer needs, packed, under the name it has there.

:mod:`fa3verify.known.peers` says which peer looks for which name.
"""

from __future__ import annotations

import lzma
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fa3_reference.rules import require
from fa3verify.known.peers import PEERS

# By the name of a distribution: its libraries, and the peers that call them.
LIBRARIES = {
    "vllm": {"_vllm_fa3_C.abi3.so": "vllm", "_vllm_fa2_C.abi3.so": "flash2.vllm"},
    "fa3-fwd": {"_C.abi3.so": "flash3"},
    "dew-flash-attn-cu13": {"libdew_flash_attn3.so": "flash3.dew"},
    "sglang-kernel": {"flash_ops.abi3.so": "sglang"},
    "sgl-kernel": {"flash_ops.abi3.so": "sglang"},
}


def unpack(wheel: Path, folder: Path) -> Iterator[str]:
    """Put the libraries of a wheel into the peers' folder, and yield a line about each.

    The line names the peer, the distribution with its version, the file and its size; and the version that the table of
    peers knows where it is another one, as bits and orders of operations are those of that one. Symbols, 4 % of a
    build, are left in.

    Raises
    ------
    ValueError
        For a file that is no wheel with a library of a peer, by its name and by what it holds.
    """
    distribution, version, *_ = [*wheel.name.split("-"), ""]
    wanted = LIBRARIES.get(distribution.replace("_", "-").lower(), {})
    require(bool(wanted) and zipfile.is_zipfile(wheel), f"{wheel} is no wheel of {', '.join(LIBRARIES)}")
    with zipfile.ZipFile(wheel) as archive:
        found = {x: wanted[name] for x in archive.namelist() if (name := x.rpartition("/")[2]) in wanted}
        require(bool(found), f"{wheel} has no {' and no '.join(wanted)}")
        for member, name in found.items():
            packed = folder / f"{PEERS[name].binary}.xz"
            part = packed.with_suffix(".part")  # no half file is ever found under the name
            with archive.open(member) as source, lzma.open(part, "wb", preset=1) as target:  # 10 s for 170 MB
                shutil.copyfileobj(source, target, 1 << 24)
            part.replace(packed)
            stated = f"{distribution} {version}".replace("_", "-")
            other = "" if stated == PEERS[name].version else f"; the table knows {PEERS[name].version}"
            yield f"{name}: {stated}, {member}, as {packed}, {packed.stat().st_size / 1e6:.1f} MB{other}"
