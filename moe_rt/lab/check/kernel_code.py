"""Read each kernel's PTX and machine code: width and depth of its moves, local memory, orders, fences and barriers.

NVIDIA's disassembler turns a cubin into text; the driver runs exactly these instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_FUNCTION = re.compile(r"^(?:\.visible\s+|\.weak\s+|\.extern\s+)?\.func\b", re.MULTILINE)
_MOVE = re.compile(r"\b(ld|st)((?:\.[\w:]+)+)[ \t]")
_OWN_MEMORY = {"shared", "local", "param", "const"}
_BITS = re.compile(r"[busf](\d+)$")


@dataclass(frozen=True)
class Orders:
    """Counts of an entry's accesses to global or generic memory."""

    wide_loads: int
    wide_stores: int
    releases: int
    acquires: int
    last_block: int


def read_orders(ptx: str) -> dict[str, Orders]:
    """Return the counts by kernel name."""
    _, *parts = _ENTRY.split(ptx)
    orders = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        body = _FUNCTION.split(body)[0]
        moves = [(match[1], match[2][1:].split(".")) for match in _MOVE.finditer(body)]
        orders[name] = Orders(
            wide_loads=sum(kind == "ld" and _num_bytes(words) >= 16 for kind, words in moves),
            wide_stores=sum(kind == "st" and _num_bytes(words) >= 16 for kind, words in moves),
            releases=_count(r"\bst\.release\.sys\b", body),
            acquires=_count(r"\bld\.acquire\.sys\b", body),
            last_block=_count(r"\batom\.(?:[\w:]+\.)*acq_rel\.gpu\b", body),
        )
    return orders


def _count(pattern: str, body: str) -> int:
    return len(re.findall(pattern, body))


def _num_bytes(words: list[str]) -> int:
    """Bytes of one access, or 0 if it is not to global or generic memory. `words` are the opcode's parts after the
    first."""
    if any(word.split("::")[0] in _OWN_MEMORY for word in words):
        return 0
    bits = _BITS.match(words[-1])
    lanes = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
    return lanes * int(bits[1]) // 8 if bits else 0


_SENDS = ("dispatch_send", "combine_send", "combine_backward_send")
_RECEIVES = ("dispatch_receive", "combine_receive", "combine_backward_receive")
_EXPECTED: dict[str, tuple[tuple[str, ...], Callable[[Orders], int]]] = {
    "loads of 16 bytes": (("dispatch_receive", "combine_send", "combine_receive"), lambda o: o.wide_loads),
    "stores of 16 bytes": (("dispatch_receive", "combine_send", "combine_receive"), lambda o: o.wide_stores),
    "st.release.sys, which announces": (_SENDS, lambda o: o.releases),
    "an atom of acq_rel.gpu, which counts blocks": (_SENDS, lambda o: o.last_block),
    "ld.acquire.sys, which waits": (_RECEIVES, lambda o: o.acquires),
}


def find_problems(orders: dict[str, Orders]) -> list[str]:
    """List what the protocol's kernels lack. The variant's rows must be a multiple of 16 bytes."""
    problems = [f"got no kernel {name}" for name in (*_SENDS, *_RECEIVES) if name not in orders]
    return problems + [
        f"{name}: got no {what}"
        for what, (names, count) in _EXPECTED.items()
        for name in names
        if name in orders and count(orders[name]) == 0
    ]


TOOL = "nvdisasm"
INSTALL = f"reading machine code needs {TOOL} on PATH or in a package; pip install nvidia-cuda-nvdisasm"
SECONDS = 600.0  # ends a tool that hangs
_KERNEL = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)\s*([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
_GLOBAL = re.compile(r"(LD|LDG|ST|STG)\.")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_LEAVES = ("BRA", "EXIT", "RET", "BAR", "BRX", "JMP")
_DEPENDS = re.compile(r"!?U?P\d")  # condition of a jump that takes it as an operand


@dataclass(frozen=True)
class MachineCode:
    """Counts of one kernel's instructions.

    Attributes:
        loads: loads from global or generic memory, by bytes per lane.
        stores: likewise.
        ahead: maximum number of consecutive loads before an instruction needs one of their results, by bytes per lane.
        local: accesses to local memory: spills, and arrays that did not fit in registers.
        barriers: barriers of a block.
        fences: by kind, such as MEMBAR.SC.GPU.
        copies: bulk copies by kind: UBLKCP.S.G into shared memory, UBLKCP.G.S out of it.
        instructions: all instructions.
    """

    loads: dict[int, int]
    stores: dict[int, int]
    ahead: dict[int, int]
    local: int
    barriers: int
    fences: dict[str, int]
    copies: dict[str, int]
    instructions: int


def find_disassembler() -> str | None:
    """Path of the disassembler on PATH, in an NVIDIA package or under CUDA_HOME; None if it is not installed."""
    if found := shutil.which(TOOL):
        return found
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:  # absent, or older than the function
        return None
    return find_nvidia_binary_utility(TOOL)


def disassemble(tool: str, cubin: bytes) -> str:
    """Return the text of a cubin.

    Raises:
        RuntimeError: the tool cannot read it; the message holds its error. An older tool does not know newer cubins.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--print-code", file.name], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{tool}: got exit status {done.returncode}, expected 0: {done.stderr.strip()}")
    return done.stdout


def read_machine_code(text: str) -> dict[str, MachineCode]:
    """Return the counts by name of each kernel, and of each function outside of the kernels."""
    _, *parts = _KERNEL.split(text)
    return {name: _read(body.split("\t.section")[0]) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _read(body: str) -> MachineCode:
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    fences: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    ahead: Counter[int] = Counter()
    local = barriers = instructions = 0
    under_way: dict[int, int] = {}  # register -> the bytes of the load that fills it
    run: Counter[int] = Counter()
    for match in _LINE.finditer(body):
        opcode, operands = match[1], match[2]
        instructions += 1
        name = opcode.split(".")[0]
        local += name in ("LDL", "STL")
        barriers += opcode.startswith("BAR.SYNC")
        if name in ("MEMBAR", "FENCE"):
            fences[opcode] += 1
        elif name == "UBLKCP":
            copies[opcode] += 1
        registers = [int(register) for register in _REGISTER.findall(operands)]
        is_load = bool(_GLOBAL.match(f"{opcode}.")) and name.startswith("LD")
        used = registers[1:] if is_load else registers
        # A jump that is not taken continues with the next line, so only unconditional jumps end a run.
        conditional = "@" in match[0] or _DEPENDS.match(operands) or opcode.startswith("BRA.DIV")
        ends = name in _LEAVES and not conditional
        if ends or not under_way.keys().isdisjoint(used):
            under_way, run = {}, Counter()
        if is_load:
            width = _width(opcode)
            loads[width] += 1
            run[width] += 1
            ahead[width] = max(ahead[width], run[width])
            if registers:
                under_way.update((registers[0] + i, width) for i in range(max(1, width // 4)))
        elif _GLOBAL.match(f"{opcode}."):
            stores[_width(opcode)] += 1
    return MachineCode(
        dict(loads), dict(stores), dict(ahead), local, barriers, dict(fences), dict(copies), instructions
    )


def _width(opcode: str) -> int:
    return next((_BYTES[part] for part in opcode.split(".") if part in _BYTES), 4)
