"""Runs cases with real packages, in an environment of their own: real_job.py <list of [case, arguments] as JSON>."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from typing import Any

import harness
import triton_stand_in  # noqa: F401
from harness import ProcessRanks, Ranks, ThreadRanks

harness.CASE_TIMEOUT_S = 2800  # every rank imports all of a package, which takes a loaded machine minutes


def ranks_of(size: int) -> Ranks:
    return ProcessRanks(size) if size > 1 else ThreadRanks(1)


def torchtitan_experts(arguments: list[str]) -> Any:
    import cases_real_torchtitan as cases

    return ranks_of(1).run(cases.equal_local_dispatch, arguments)


def torchtitan_parallelized(tokens: list[int]) -> Any:
    import cases_real_torchtitan as cases

    return ranks_of(len(tokens)).run(cases.equal_dense_layer, tokens)


def torchtitan_signatures(parameters: dict[str, list[str]]) -> None:
    import cases_real_torchtitan as cases

    cases.check_signatures(parameters)


def megatron_dispatcher(tokens: list[int], options: dict[str, Any]) -> Any:
    import cases_real_megatron as cases

    return ranks_of(len(tokens)).run(cases.equal_dense, tokens, options)


def megatron_over_budget() -> Any:
    import cases_real_megatron as cases

    return ranks_of(2).run(cases.over_budget)


def megatron_signatures(parameters: dict[str, list[str]], attributes: list[str]) -> None:
    import cases_real_megatron as cases

    cases.check_signatures(parameters, attributes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    outcomes = []
    for case, arguments in json.loads(sys.argv[1]):
        try:
            outcomes.append([globals()[case](*arguments), None])
        except Exception:
            outcomes.append([None, traceback.format_exc()])
    print(json.dumps(outcomes), flush=True)
