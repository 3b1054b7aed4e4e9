"""Commands a user types after installing moe_rt: run in an environment under test, with results printed as JSON.

python uses.py [names to leave out]
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback

COMMANDS = {
    "help": ["moe_rt", "--help"],
    "version": ["moe_rt", "--version"],
    "info": ["moe_rt", "info"],
    "pages": ["moe_rt", "docs"],
    "docs": ["moe_rt", "docs", "errors#invalidconfig"],
    "bench refused": ["moe_rt", "bench", "--contestants", "nobody"],
    "bench help": ["moe_rt", "bench", "--help"],
    "bench report": ["moe_rt", "bench", "--report", "report", "--contestants", "nobody"],
    "chaos help": ["moe_rt", "chaos", "--help"],
    "gpucheck help": ["moe_rt", "gpucheck", "--help"],
    "gpucheck compile": ["moe_rt", "gpucheck", "--compile-only", "--arch", "sm_90a"],
    "train help": ["moe_rt.train", "--help"],
    "train": ["moe_rt.train", "--data", "nowhere"],
    "transformers": ["moe_rt.integrations.transformers"],
}


def run(module: str, arguments: list[str]) -> tuple[int, str]:
    """Return exit status and output of `python -m module arguments`, run here because importing torch takes seconds."""
    output = io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:
            status = 1
            traceback.print_exc()
    return status, output.getvalue()


def a_round() -> tuple[int, str]:
    """Run a dispatch and its combine on one rank: with weights of 1, every token comes back doubled."""
    try:
        import torch

        from moe_rt import Buffer

        sizes = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=2, num_experts=4, dtype=torch.float32)
        with Buffer(None, **sizes) as buffer:
            x = torch.randn(4, 8)
            recv_x, recv_weights, handle = buffer.dispatch(x, torch.tensor([[0, 3]] * 4), torch.ones(4, 2))
            torch.testing.assert_close(buffer.combine(recv_x, recv_weights, handle), 2 * x)
    except Exception:
        return 1, traceback.format_exc()
    return 0, ""


def toolkit() -> tuple[int, str]:
    """Return status 0 if kernels can be compiled here."""
    from moe_rt.engine.gpu.libraries import NVSHMEM
    from moe_rt.engine.gpu.nvrtc import find_toolkit
    from moe_rt.errors import CompileError

    try:
        find_toolkit(NVSHMEM)
    except CompileError as error:
        return 1, str(error)
    return 0, ""


if __name__ == "__main__":
    left_out = sys.argv[1:]
    results = {"round": a_round(), "toolkit": toolkit()}
    results |= {name: run(line[0], line[1:]) for name, line in COMMANDS.items() if name not in left_out}
    results["installed"] = (0, " ".join(sorted(sys.modules)))
    print(json.dumps(results))
