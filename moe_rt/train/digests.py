"""Digests of a checkpoint's files: written when it is complete, compared before any of it is read.

The file SHA256SUMS has the format of `sha256sum --check`. It must name exactly the files that exist, so lost or altered
lines are detected as well. Digests detect accidents, not attackers, who could rewrite them with the files.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch.distributed as dist

from moe_rt.errors import CorruptCheckpoint, WriteFailed
from moe_rt.train.all_or_none import all_or_none, in_words

SUMS = "SHA256SUMS"
READ, WRITE = "read a checkpoint", "write a checkpoint"
CHUNK = 1 << 20  # bytes per read


def write(directory: Path) -> None:
    """Read every file in `directory` back, each on one rank, and write their digests. Collective over the world.

    Raises:
        WriteFailed: a file cannot be read or written; raised on all ranks.
    """
    (names, *_) = all_or_none(lambda: sorted(path.name for path in directory.iterdir()), WriteFailed, READ)
    shares = all_or_none(lambda: {name: _sha256(directory / name) for name in _share(names)}, WriteFailed, READ)
    digests = {name: digest for share in shares for name, digest in share.items()}
    text = "".join(f"{digests[name]}  {name}\n" for name in names)
    all_or_none(lambda: (directory / SUMS).write_text(text) if dist.get_rank() == 0 else None, WriteFailed, WRITE)


def check(directory: Path) -> None:
    """Compare every file in `directory`, each on one rank, with its digest. Collective over the world.

    Raises:
        CorruptCheckpoint: names each file that differs and how; raised on all ranks.
    """
    seen_by_ranks = all_or_none(lambda: _damage_seen_here(directory), CorruptCheckpoint, READ)
    clauses = {clause for seen in seen_by_ranks for clause in seen}
    if clauses:
        raise CorruptCheckpoint("; ".join(sorted(clauses)))


def _damage_seen_here(directory: Path) -> list[str]:
    try:
        expected = _parse((directory / SUMS).read_text(encoding="ascii"))
        found = {path.name for path in directory.iterdir()} - {SUMS}
    except (OSError, ValueError) as error:
        return [f"{SUMS}: got {in_words(error)}, expected the digests of this checkpoint"]
    clauses = [f"{name}: got no such file, expected one" for name in expected.keys() - found]
    clauses += [f"{name}: got a file, expected none, since {SUMS} does not name it" for name in found - expected.keys()]
    for name in _share(sorted(found & expected.keys())):
        path = directory / name
        try:
            got = f"digest {_sha256(path)}" if path.is_file() else "no regular file"
        except OSError as error:
            got = in_words(error)
        if got != f"digest {expected[name]}":
            clauses.append(f"{name}: got {got}, expected digest {expected[name]}")
    return clauses


def _parse(text: str) -> dict[str, str]:
    """Parse file name -> digest from a text that is exactly what `write` writes."""
    lines = re.findall(r"([0-9a-f]{64})  ([^/\n]+)\n", text)
    if "".join(f"{digest}  {name}\n" for digest, name in lines) != text:
        raise ValueError("a line that is no digest and file name")
    return {name: digest for digest, name in lines}


def _share(names: list[str]) -> list[str]:
    """Names that this rank reads."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
