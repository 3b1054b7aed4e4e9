"""Records of results, one line each in a file of JSON next to a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return a value of JSON; of a dataclass, the fields that differ from its defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in fields(value)}
        return {f.name: plain(found[f.name]) for f in fields(value) if found[f.name] != f.default}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if isinstance(value, (int, str, type(None))) else str(value)


def differences(record: Path, part: str, now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a part of a record has and what there is now, by name, where they differ."""
    before, now = json.loads(record.read_text())[part], json.loads(json.dumps(now))
    return {name: (before.get(name), now.get(name)) for name in before | now if before.get(name) != now.get(name)}


def write(record: Path, parts: Mapping[str, dict[str, Any]]) -> None:
    texts = []
    for name, part in parts.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in part.items()]
        texts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    record.write_text("{\n" + ",\n".join(texts) + "\n}\n")
