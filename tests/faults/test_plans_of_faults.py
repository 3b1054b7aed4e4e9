"""Every plan of a fault: what the engine is given on each rank, and the whole message of each refusal."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt import faults
from moe_rt.errors import FaultInjected, InvalidConfig
from moe_rt.faults import ACTIONS, POINTS, Action, Point, planned

SIZE = 3
AT = ", ".join(name.lower() for name in Point.__members__ if name != "NONE")
DO = "kill, stop, sleep=SECONDS, raise or corrupt"


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults._engine, "Fault", lambda **fields: SimpleNamespace(**fields))


def plan(monkeypatch: pytest.MonkeyPatch, text: str, rank: int = 1, on_cpu: bool = True) -> dict[str, Any]:
    monkeypatch.setenv("MOE_RT_FAULT", text)
    return vars(planned(rank, SIZE, on_cpu))


def test_points_and_actions_have_names() -> None:
    assert list(POINTS) == AT.split(", ")
    assert list(ACTIONS) == ["kill", "stop", "sleep", "raise", "corrupt"]
    assert (list(POINTS.values()), list(ACTIONS.values())) == (list(Point)[1:], list(Action)[1:])


@pytest.mark.parametrize("at", POINTS)
def test_a_plan_is_of_one_rank(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Other ranks check the plan as well, and have no fault."""
    actions = ["kill", "stop", "raise", "sleep=0.25", "sleep=0", *(["corrupt"] if at == "after_payload" else [])]
    for do, rank in itertools.product(actions, range(SIZE)):
        name, _, seconds = do.partition("=")
        same = {"op": 4, "seconds": float(seconds or 0.0)}
        mine = {"at": POINTS[at], "action": ACTIONS[name]} if rank == 2 else {"at": Point.NONE, "action": Action.NONE}
        assert plan(monkeypatch, f"rank=2,op=4,at={at},do={do}", rank) == {**mine, **same}
        assert plan(monkeypatch, f"do={do},at={at},rank=2", rank) == {**mine, **same, "op": 1}


def test_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"at": Point.NONE, "action": Action.NONE, "op": 0, "seconds": 0.0}
    assert plan(monkeypatch, "") == plan(monkeypatch, "", on_cpu=False) == nothing
    monkeypatch.delenv("MOE_RT_FAULT")
    assert vars(planned(0, SIZE, on_cpu=True)) == nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "fields: got ['nonsense'], expected rank, op, at and do"),
        ("rank=0,when=1,Do=kill", "fields: got ['Do', 'when'], expected rank, op, at and do"),
        ("at=mid_read,do=kill", "rank: got , expected a number"),
        ("rank=1.0,at=mid_read,do=kill", "rank: got 1.0, expected a number"),
        ("rank=3,at=mid_read,do=kill", "rank: got 3, expected [0, 3)"),
        ("rank=-1,at=mid_read,do=kill", "rank: got -1, expected [0, 3)"),
        ("rank=0,op=0,at=mid_read,do=kill", "op: got 0, expected at least 1"),
        ("rank=0,op=,at=mid_read,do=kill", "op: got , expected a number"),
        ("rank=0,do=kill", f"at: got None, expected one of {AT}"),
        ("rank=0,at=none,do=kill", f"at: got none, expected one of {AT}"),
        ("rank=0,at=mid_read", f"do: got None, expected {DO}"),
        ("rank=0,at=mid_read,do=none", f"do: got none, expected {DO}"),
        ("rank=0,at=mid_read,do=kill=1", f"do: got kill=1, expected {DO}"),
        ("rank=0,at=mid_read,do=sleep", f"do: got sleep, expected {DO}"),
        ("rank=0,at=mid_read,do=sleep=x", "sleep: got x, expected a number"),
        ("rank=0,at=mid_read,do=sleep=nan", "sleep: got nan, expected seconds"),
        ("rank=0,at=mid_read,do=sleep=inf", "sleep: got inf, expected seconds"),
        ("rank=0,at=mid_read,do=sleep=-0.001", "sleep: got -0.001, expected seconds"),
        (
            "rank=0,at=mid_read,do=corrupt",
            "at: got mid_read, expected after_payload, since only what is not announced yet can be corrupted",
        ),
    ],
)
def test_whole_refusals(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    for rank in range(SIZE):
        with pytest.raises(InvalidConfig) as raised:
            plan(monkeypatch, text, rank)
        assert str(raised.value).removesuffix(" (moe-rt docs errors#invalidconfig)") == f"MOE_RT_FAULT: {message}"


def test_a_plan_for_cuda_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "rank=0,at=mid_read,do=kill"
    with pytest.raises(InvalidConfig, match=f"^MOE_RT_FAULT: a fault: got {text}, expected none on CUDA ranks "):
        plan(monkeypatch, text, on_cpu=False)
    with pytest.raises(InvalidConfig, match=r"^MOE_RT_FAULT: at: got mid_read, expected after_payload"):
        plan(monkeypatch, "rank=0,at=mid_read,do=corrupt", on_cpu=False)


def test_a_point_outside_of_ops() -> None:
    """A fault strikes at its own point only, and raises if its action is to raise."""
    struck: list[str] = []

    def fault(goes_on: bool) -> Any:
        return SimpleNamespace(at=Point.IN_DESTROY, strike=lambda: struck.append("struck") or goes_on)

    faults.reach(fault(False), Point.PRE_RENDEZVOUS)
    assert struck == []
    faults.reach(fault(True), Point.IN_DESTROY)
    assert struck == ["struck"]
    with pytest.raises(FaultInjected, match=r"^failed at in_destroy as MOE_RT_FAULT asked "):
        faults.reach(fault(False), Point.IN_DESTROY)
    assert struck == ["struck"] * 2
