"""`moe-rt on-cpu`: a program written for CUDA runs on CPU ranks, whatever starts them; nothing acts unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = HERE / "cuda_program.py"
ON_CPU = [sys.executable, "-m", "moe_rt", "on-cpu"]
TEST = """
import torch
import deep_ep

def test_it():
    assert torch.ones(2, device="cuda").is_cuda
    assert deep_ep.Buffer.__module__ == "moe_rt.compat.deep_ep.buffer"
"""


def run(*command: str | Path, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def test_a_program_alone() -> None:
    done = run(*ON_CPU, "--", sys.executable, PROGRAM)
    assert done.stdout == "passed\n"
    assert "deep_ep is moe_rt.compat.deep_ep" in done.stderr.splitlines()[0]


def test_two_ranks() -> None:
    done = run(*ON_CPU, "--ranks", "2", "--", sys.executable, PROGRAM)
    assert done.stdout.count("passed") == 2
    assert done.stdout.count("moe_rt.compat.deep_ep") == 2


def test_ranks_of_torchrun_inherit_it() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*ON_CPU, "--", *torchrun, PROGRAM)
    assert done.stdout.count("passed") == 2


def test_a_rank_that_fails_ends_the_others_and_gives_its_status() -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    done = run(*ON_CPU, "--ranks", "2", "--", sys.executable, "-c", code, status=7)
    assert "rank 1 ended with status 7" in done.stderr


def test_a_program_beside_python_is_found_and_one_that_cannot_run_is_named(tmp_path: Path) -> None:
    python = Path(sys.executable).name
    assert run(*ON_CPU, "--", python, "-c", "print(5)", PATH="/nowhere").stdout == "5\n"
    (tmp_path / "script.py").write_text("print(5)\n")
    for ranks in ((), ("--ranks", "2")):
        done = run(*ON_CPU, *ranks, "--", tmp_path / "script.py", status=1)
        assert f"got {tmp_path / 'script.py'}, expected a program that can be run" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_option_that_does_not_exist_is_no_program() -> None:
    done = run(*ON_CPU, "--rank", "2", "--", sys.executable, "-c", "print(5)", status=2)
    assert "No such option '--rank'" in done.stderr
    assert "--ranks" in done.stderr


def test_an_installed_deep_ep_is_left_alone_and_said(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("Buffer = 'real'\n")
    done = run(*ON_CPU, "--", sys.executable, "-c", "import deep_ep; print(deep_ep.Buffer)", PYTHONPATH=str(tmp_path))
    assert done.stdout == "real\n"
    assert f"the installed deep_ep in {tmp_path / 'deep_ep.py'}" in done.stderr


def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    code = "import sys; print(sys.customized)"
    assert run(*ON_CPU, "--", sys.executable, "-c", code, PYTHONPATH=str(tmp_path)).stdout == "True\n"


def test_the_plug_in_acts_only_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    assert "1 passed" in run(*pytest, "-p", "moe_rt.lab.on_cpu.plugin").stdout
    run(*pytest, status=2)  # deep_ep cannot be imported


def test_nothing_of_the_library_imports_it() -> None:
    code = "import sys, moe_rt.compat.deep_ep, moe_rt.nn.layer; print([m for m in sys.modules if 'on_cpu' in m])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"
