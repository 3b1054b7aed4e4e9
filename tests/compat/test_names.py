"""deep_ep has DeepEP's public names with their parameters, and the table in docs/api/deep_ep.md names each of them.

deepep_names.json holds the names and parameters of DeepEP 2.1.0 with their defaults, by class or module.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_rt.compat import deep_ep

NAMES: dict[str, str] = json.loads((Path(__file__).parent / "deepep_names.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs/api/deep_ep.md").read_text()
REFUSED = {name for name in NAMES if re.search(r"engram|pp_|agrs|all_gather", name)}  # they take any arguments
OF_THE_MACHINE = {"nic_name"}  # a default that DeepEP reads from the environment
OTHER_PARAMETERS = {"EPHandle.__init__", "ElasticBuffer.get_theoretical_num_sms"}  # no caller makes a handle


def named() -> dict[str, str]:
    """Return what each row of the tables says, by pattern of a name."""
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| ")]
    return {pattern: says for names, says in rows for pattern in re.findall(r"`([\w.*]+)", names)}


def found(name: str) -> Any:
    """Return the object of this name, or None."""
    owner, _, member = name.rpartition(".")
    if not owner.startswith("utils"):
        return getattr(getattr(deep_ep, owner), member, None)
    try:
        return getattr(importlib.import_module(f"moe_rt.compat.deep_ep.{owner}"), member, None)
    except ModuleNotFoundError:
        return None


def parameters_of(function: Any) -> list[str]:
    """Return the parameters, as in NAMES."""
    found = [each for name, each in inspect.signature(function).parameters.items() if name != "self"]
    return [
        each.name if each.name in OF_THE_MACHINE or each.default is each.empty else f"{each.name}={each.default!r}"
        for each in found
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there_with_its_parameters_or_absent_by_name(name: str) -> None:
    patterns = [name, name.rpartition(".")[2], name.rpartition(".")[0]]
    rows = [says for pattern, says in named().items() for each in patterns if fnmatch.fnmatchcase(each, pattern)]
    assert rows, "the tables do not name it"
    there = found(name)
    if there is None:
        assert any("absent" in says for says in rows)
    elif name not in REFUSED | OTHER_PARAMETERS:
        assert parameters_of(there)[: len(NAMES[name].split())] == NAMES[name].split()
    if name in REFUSED:
        assert any("refused" in says for says in rows)


def test_every_name_of_the_tables_exists() -> None:
    """Names in the first column are DeepEP's, or parameters of its functions."""
    parameters = {word.partition("=")[0] for given in NAMES.values() for word in given.split()}
    words = parameters | {word for name in NAMES for word in (*name.split("."), name)}
    words |= {name.rpartition(".")[0] for name in NAMES} | {"topk_idx_t", "timeout_s"}
    for pattern in named():
        assert fnmatch.filter(words, pattern), pattern
