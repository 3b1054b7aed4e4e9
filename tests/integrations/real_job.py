"""Run cases with real packages, in their own environment: real_job.py <list of [case, arguments] as JSON>."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from typing import Any

import integrations.fake_triton  # noqa: F401
import support.ranks
from support.ranks import ProcessRanks, Ranks, ThreadRanks, named_case

from moe_rt.lab.testing import forking

support.ranks.CASE_TIMEOUT_S = 2800  # every rank imports all of a package, which takes minutes on a loaded machine


def ranks_of(size: int) -> Ranks:
    return ProcessRanks(size) if size > 1 else ThreadRanks(1)


def torchtitan_experts(arguments: list[str]) -> Any:
    from integrations import cases_real_torchtitan as cases

    return ranks_of(1).run(cases.equal_local_dispatch, arguments)


def torchtitan_parallelized(tokens: list[int]) -> Any:
    from integrations import cases_real_torchtitan as cases

    return ranks_of(len(tokens)).run(cases.equal_dense_layer, tokens)


def torchtitan_signatures(parameters: dict[str, list[str]]) -> None:
    from integrations import cases_real_torchtitan as cases

    cases.check_signatures(parameters)


def megatron(size: int, case: str, *arguments: Any) -> Any:
    """Run the case on ranks of a server that has imported Megatron-Core: any other start takes longer."""
    if (module := "cases_real_megatron") not in forking.PRELOAD:
        forking.PRELOAD.append(module)
    return ProcessRanks(size).run(named_case, module, case, *arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    outcomes = []
    for case, arguments in json.loads(sys.argv[1]):
        try:
            outcomes.append([globals()[case](*arguments), None])
        except Exception:
            outcomes.append([None, traceback.format_exc()])
    print(json.dumps(outcomes), flush=True)
