"""Every error, option and keyword that a document names exists in the code, and walks through files are taken."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from types import FrameType

import click
import pytest
import torch
import torch.distributed as dist

from moe_rt import Buffer, MoEConfig, MoELayer, errors
from moe_rt.cli import main as moe_rt_command
from moe_rt.integrations.megatron import MoeRtManager
from moe_rt.integrations.torchtitan import token_dispatcher
from moe_rt.lab.chaos.deaths import main as deaths
from moe_rt.lab.chaos.matrix import main as matrix
from moe_rt.lab.chaos.node_matrix import main as node_matrix
from moe_rt.train.cli import main as train

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALL = re.compile(r"(?:moe-rt (?P<command>[a-z]+)|-m moe_rt\.(?P<module>[\w.]+))(?P<rest>[^`|;&#]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SPAN = re.compile(r"`(--[a-z][\w.-]*)[^`]*`")
MODULES: dict[str, click.Command] = {
    "train": train,
    "lab.chaos.deaths": deaths,
    "lab.chaos.matrix": matrix,
    "lab.chaos.node_matrix": node_matrix,
}
# Options of other programs that documents name.
OF_OTHERS = {
    "--max-restarts": "torchrun",
    "--rdzv-endpoint": "torchrun",
    "--rdzv-conf": "torchrun",
    "--nproc-per-node": "torchrun",
    "--training.disable_cuda_graphs": "torchtitan",
    "--compile.enable": "torchtitan",
    "--late-ms": "bench/overlap.py",
    "--intermediate": "bench/overlap.py",
    "--sample": "tools/sampled_mutants.py",
    "--jobs": "tools/sampled_mutants.py",
} | dict.fromkeys(
    (
        *("--additional-config", "--all2all-backend", "--data-parallel-size", "--enable-dbo", "--enable-eplb"),
        *("--cpu-distributed-timeout-seconds", "--enable-fault-tolerance", "--max-num-batched-tokens"),
        *("--api-server-count", "--async-scheduling", "--disable-nccl-for-dp-synchronization", "--dp-sync-interval"),
        *("--enable-elastic-ep", "--enable-ep-weight-filter", "--enable-shm-tensor-arena"),
        *("--expert-placement-strategy", "--pipeline-parallel-size", "--prefill-context-parallel-size"),
        *(
            "--enable-return-routed-experts",
            "--enable-expert-parallel",
            "--enable-lora",
            "--enforce-eager",
            "--gpu-memory-utilization",
            "--model",
        ),
        *("--tensor-parallel-size", "--ubatch-size", "--enable-return-routed-experts"),
    ),
    "vllm",
)
KEYWORD = re.compile(r"`([a-z_]+)(?:=[^`]*)?`")
# Tables of keywords, by document and first words of their header, and the callables that take these keywords.
TABLES = {
    ("docs/howto/capacity.md", "| `capacity_factor`, `overflow` |"): (Buffer, MoEConfig),
    ("docs/howto/adapters.md", "| Field |"): (token_dispatcher,),
    ("docs/howto/adapters.md", "| `static_shapes` |"): (MoeRtManager,),
}


def options_of(command: click.Command) -> set[str]:
    parts = [command, *commands_of(command).values()]
    parameters = [parameter for part in parts for parameter in part.params]
    return {"--help", *(name for parameter in parameters for name in parameter.opts + parameter.secondary_opts)}


def commands_of(group: click.Command) -> dict[str, click.Command]:
    if not isinstance(group, click.Group):
        return {}
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in commands.items() if command is not None}


def commands() -> dict[str, click.Command]:
    return commands_of(moe_rt_command)


def text_of(document: Path) -> str:
    return re.sub(r"\\\n\s*", " ", document.read_text())


def keywords_of(*owners: object) -> set[str]:
    names: set[str] = set()
    for owner in owners:
        is_fields = dataclasses.is_dataclass(owner)
        names |= {f.name for f in dataclasses.fields(owner)} if is_fields else set(inspect.signature(owner).parameters)
    return names


def test_every_error_has_a_section_and_every_section_an_error() -> None:
    headings = set(re.findall(r"^## ([A-Z]\w*[a-z][A-Z]\w*)$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    family = {n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MoeRtError)}
    assert headings == family


@pytest.mark.parametrize("document", DOCS, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_errors_that_documents_link_to(document: Path) -> None:
    for name, section in re.findall(r"\[`?(\w+)`?\]\((?:[\w./]*errors\.md)?#(\w+)\)", document.read_text()):
        if name.lower() == section and name != section:
            assert hasattr(errors, name), f"{document.name} names {name}"


@pytest.mark.parametrize("document", DOCS, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_options_exist(document: Path) -> None:
    text, known = text_of(document), commands()
    for call in CALL.finditer(text):
        name, module = call["command"], call["module"]
        command = known.get(name) if name else MODULES.get(module)
        line = call["rest"].split("\n")[0].split(" -- ")[0]  # the words that follow belong to another command
        assert command is not None or not OPTION.findall(line), f"{document.name}: no options of {call[0]} are known"
        for option in OPTION.findall(line):
            assert command is not None
            assert option in options_of(command), f"{document.name}: {name or module} has no {option}"
    ours = set().union(*map(options_of, [*known.values(), *MODULES.values()]))
    for option in SPAN.findall(text):
        assert option in ours or option in OF_OTHERS, f"{document.name}: no command has {option}"


@pytest.mark.parametrize(("document", "head"), TABLES)
def test_keywords_of_tables_exist(document: str, head: str) -> None:
    known = keywords_of(*TABLES[document, head])
    lines = (ROOT / document).read_text().splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.startswith(head))
    rows = [first]
    while lines[rows[-1] + 1].startswith("|"):
        rows.append(rows[-1] + 1)
    named = {name for row in rows for name in KEYWORD.findall(lines[row].split("|")[1])}
    assert named
    assert named <= known, named - known


def test_keywords_of_models_exist() -> None:
    """The rows of docs/howto/layer.md name keywords that exist."""
    fields = keywords_of(MoEConfig)
    for line in (ROOT / "docs/howto/layer.md").read_text().splitlines():
        if line.startswith("|"):
            for name in re.findall(r"`([a-z_]+)=[^`]*`", line):
                assert name in fields, f"{name} in {line}"


def test_the_walks_through_the_files() -> None:
    """Python enters the functions of CONTRIBUTING's walks in that order; those of C++ are defined in their files."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    forward, buffer = (
        re.findall(r"^(\S+\.\w+) +([\w.]+(?:, \w+)*)", walk, re.MULTILINE)
        for walk in re.findall(r"^```text\n(moe_rt/nn/layer\.py.*?|moe_rt/buffer/buffer\.py.*?)```", text, re.S | re.M)
    )
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append((frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name))

    sizes = dict(num_max_tokens_per_rank=8, hidden=16, num_topk=2, num_experts=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = MoELayer(MoEConfig(**sizes, intermediate=8))  # type: ignore[arg-type]
        layer(torch.randn(4, 16))
        for walk, take in (
            (forward, lambda: layer(torch.randn(4, 16))),
            (buffer, lambda: Buffer(None, dtype=torch.float32, **sizes).close()),  # type: ignore[arg-type]
        ):
            entered.clear()
            sys.setprofile(note)
            try:
                take()
            finally:
                sys.setprofile(None)
            calls = iter(entered)
            in_python = [(file, name.rpartition(".")[2]) for file, name in walk if file.startswith("moe_rt/")]
            assert [step for step in in_python if step not in calls] == []
        layer.buffer.close()
    finally:
        dist.destroy_process_group()
    in_cpp = [(file, name) for file, names in forward if file.startswith("cuda/") for name in names.split(", ")]
    assert len(in_python) + len(in_cpp) > 10
    for file, name in in_cpp:
        assert re.search(rf"\b{name} ?[({{]|::{name}\(", (ROOT / file).read_text()), f"{file} has no {name}"
