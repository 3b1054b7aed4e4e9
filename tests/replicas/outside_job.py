"""Run cases with other trainers and optimizers, in their environment: outside_job.py <[[case, arguments]] as JSON>."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from typing import Any

import support.ranks
from replicas import cases_outside as cases
from support.ranks import ProcessRanks

from moe_rt.lab.testing import forking

support.ranks.CASE_TIMEOUT_S = 900  # every rank imports all of a package, which takes minutes on a loaded machine


def readable(outcome: Any) -> Any:
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, Exception) else outcome


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    forking.PRELOAD.append("cases_outside")
    outcomes = []
    for case, arguments in json.loads(sys.argv[1]):
        try:
            alone = getattr(cases, f"{case}_alone", None)
            ranks = ProcessRanks(2)
            results = [readable(outcome) for outcome in ranks.outcomes(getattr(cases, case), *arguments)]
            ranks.close()
            outcomes.append([[*results, alone(*arguments) if alone else None], None])
        except Exception:
            outcomes.append([None, traceback.format_exc()])
    print(json.dumps(outcomes), flush=True)
