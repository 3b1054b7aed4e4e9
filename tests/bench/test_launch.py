"""Whoever listens to ranks has their records, and hears of each rank that ended in another way than well."""

from __future__ import annotations

import sys

import pytest

from moe_rt.bench.launch import RankFailed, listen
from moe_rt.testing.programs import Program, running


def program(code: str) -> Program:
    return Program([sys.executable, "-c", f"import os\n{code}"], {})


@pytest.mark.parametrize(("end", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_a_rank_that_fails(end: str, status: int) -> None:
    with running([program("pass"), program(end)]) as processes, pytest.raises(RankFailed, match=f"status {status};"):
        listen(processes, lambda part: None)


def test_records_come_between_other_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[float] = []
    says = "print('of a library'); print('{\"progress\": 0.5}'); print('{\"record\": {\"a\": 1}}'); print('[1]')"
    with running([program(says)]) as processes:
        assert listen(processes, parts.append) == [{"a": 1}]
    assert parts == [0.5]
    assert capsys.readouterr().err == "of a library\n[1]\n"
