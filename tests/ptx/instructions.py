"""C++ for each PTX instruction, on registers that are unsigned integers of their width.

It uses the names of arithmetic.h and lane.h. An opcode or modifier not listed here is an error.
"""

from __future__ import annotations

from collections.abc import Callable

from ptx import bulk, calls
from ptx.parse import Instruction, TranslationError
from ptx.writer import TYPES, Writer, assign, label, register

INTEGERS = {name for name in TYPES if name[0] in "su" and name != "s8" and name != "u8"}
FLOATS = {"f32", "f64"}
_HALVES = {"f16", "bf16"}
BITS = {"b16", "b32", "b64", "pred"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SPACES = {"global": "kGlobal", "shared": "kShared", "local": "kLocal", "param": "kParam"}
_ORDERS = {"relaxed": "", "acquire": "|kAcquire", "release": "|kRelease", "acq_rel": "|kAcquire|kRelease"}
_SCOPES = {"sys": "|kSystem", "gpu": ""}
_RMW = {"add": "a + b", "min": "b < a ? b : a", "max": "a < b ? b : a", "or": "a | b", "and": "a & b"}


def statement(w: Writer, i: Instruction) -> str:
    """Return one C++ statement."""
    w.where = f"{w.entry.name}, line {i.line} ({i.where})"
    head, *modifiers = i.opcode.split(".")
    text = _HANDLERS[head](w, i, modifiers) if head in _HANDLERS else None
    if text is None:
        raise TranslationError(f"{w.where}: got {i.text!r}, which the tool does not know")
    if i.predicate is None:
        return text
    negated = i.predicate.startswith("!")
    return f"if ({'!' if negated else ''}{register(i.predicate.lstrip('!'))}) {{ {text} }}"


def _apply(formula: str, kinds: set[str], modifiers: tuple[str, ...] = ()) -> Callable[..., str | None]:
    """Return a handler for an instruction whose operands and result have its last modifier's type, {T} in C++."""

    def write(w: Writer, i: Instruction, given: list[str]) -> str | None:
        kind = given[-1] if given else ""
        if kind not in kinds or tuple(given[:-1]) != modifiers:
            return None
        target, *sources = i.operands
        return assign(target, formula.format(*(w.value(s, kind) for s in sources), T=TYPES[kind]))

    return write


def _either(*handlers: Callable[..., str | None]) -> Callable[..., str | None]:
    def write(w: Writer, i: Instruction, given: list[str]) -> str | None:
        return next((text for h in handlers if (text := h(w, i, given)) is not None), None)

    return write


def _shift(name: str, kinds: set[str]) -> Callable[..., str | None]:
    def write(w: Writer, i: Instruction, given: list[str]) -> str | None:
        if len(given) != 1 or given[0] not in kinds:
            return None
        target, value, by = i.operands
        return assign(target, f"{name}({w.value(value, given[0])}, {w.value(by, 'u32')})")

    return write


def _multiply(w: Writer, i: Instruction, given: list[str]) -> str | None:
    part, kind = given[0], given[-1]
    if part not in ("wide", "hi") or kind not in ("s16", "u16", "s32", "u32"):
        return None
    bits = int(kind[1:])
    wide = TYPES[f"{kind[0]}{2 * bits}"]
    target, a, b = i.operands
    product = f"multiply({wide}({w.value(a, kind)}), {wide}({w.value(b, kind)}))"
    return assign(target, product if part == "wide" else f"{TYPES[kind]}({product} >> {bits})")


def _compare(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if len(given) != 2:
        return None
    how, kind = given
    unordered = kind in FLOATS and how.endswith("u") and how[:-1] in _COMPARISONS
    sign = _COMPARISONS.get(how[:-1] if unordered else how)
    if sign is None or kind not in INTEGERS | FLOATS | BITS:
        return None
    target, *sources = i.operands
    a, b = (w.value(s, kind) for s in sources)
    if kind not in FLOATS:
        return f"{register(target)} = {a} {sign} {b};"
    return f"{register(target)} = {'unordered' if unordered else 'ordered'}({a}, {b}, {a} {sign} {b});"


def _select(w: Writer, i: Instruction, given: list[str]) -> str | None:
    target, a, b, p = i.operands
    return assign(target, f"{register(p)} ? {w.value(a, given[0])} : {w.value(b, given[0])}")


def _move(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if len(given) != 1 or given[0] not in TYPES:
        return None
    target, source = i.operands
    if "{" not in target + source:
        return assign(target, w.value(source, given[0]))
    parts = [name.strip() for name in (target + source).partition("{")[2].partition("}")[0].split(",")]
    width = int(given[0][1:]) // len(parts)
    if "{" in source:
        shifted = (f"uint64_t({w.value(name, f'u{width}')}) << {k * width}" for k, name in enumerate(parts))
        return assign(target, f"{TYPES[given[0]]}({' | '.join(shifted)})")
    value = w.value(source, given[0])
    return " ".join(assign(name, f"{TYPES[f'u{width}']}({value} >> {k * width})") for k, name in enumerate(parts))


def _convert(w: Writer, i: Instruction, given: list[str]) -> str | None:
    *how, to, source = given
    if given == ["rn", "satfinite", "e4m3x2", "f32"]:
        target, high, low = i.operands
        codes = (f"e4m3({w.value(name, 'f32')})" for name in (high, low))
        return assign(target, "uint16_t({} << 8 | {})".format(*codes))
    if to not in TYPES or source not in TYPES:
        return None
    value, into = w.value(i.operands[1], source), TYPES[to]
    integers = (to not in FLOATS, source not in FLOATS)
    if {to, source} & _HALVES:
        widens, narrows = how == [] and to == "f32", how == ["rn"] and source == "f32"
        return assign(i.operands[0], f"{into}({value})") if widens or narrows else None
    if how == [] and (integers == (True, True) or (to, source) == ("f64", "f32")):
        return assign(i.operands[0], f"{into}({value})")
    if how == ["rn"] and (integers == (False, True) or (to, source) == ("f32", "f64")):
        return assign(i.operands[0], f"{into}({value})")
    if how == ["rzi"] and integers == (True, False):
        return assign(i.operands[0], f"truncate<{into}>({value})")
    if how == ["sat"] and to == source and to in FLOATS:
        return assign(i.operands[0], f"saturate({value})")
    return None


def _convert_address(w: Writer, i: Instruction, given: list[str]) -> str | None:
    bases = {"local": "ptx_local(lane)", "shared": "ptx_shared(lane)", "global": "0"}
    target, source = i.operands
    match given:
        case [space, "u64"] if space in bases:
            return assign(target, f"{w.value(source, 'u64')} + {bases[space]}")
        case ["to", space, "u64"] if space in bases:
            return assign(target, f"{w.value(source, 'u64')} - {bases[space]}")
    return None


def _in_space(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if given != ["local"]:
        return None
    return f"{register(i.operands[0])} = ptx_is_local(lane, {w.value(i.operands[1], 'u64')});"


def _memory(w: Writer, i: Instruction, given: list[str], how: str) -> tuple[str, str, int] | None:
    """Return the access's pointer expression, type and element count."""
    rest = list(given)
    if rest[0] in ("relaxed", "acquire", "release"):
        order, scope = rest.pop(0), rest.pop(0)
        if scope not in _SCOPES:
            return None
        how += "|kAtomic" + _ORDERS[order] + _SCOPES[scope]
    space = _SPACES[rest.pop(0)] if rest[0] in _SPACES else "kGeneric"
    count = int(rest.pop(0)[1]) if rest[0] in ("v2", "v4") else 1
    if len(rest) != 1 or rest[0] not in TYPES:
        return None
    place = i.operands[0] if "kWrite" in how else i.operands[1]
    pointer = f"ptx_access(lane, {space}, {w.address(place)}, {count} * sizeof({TYPES[rest[0]]}), {how}, {w.site})"
    return pointer, rest[0], count


def _load(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if given[0] == "global" and i.operands[1][1:-1].partition("+")[0] in w.entry.zeros:
        names = (name.strip() for name in i.operands[0].strip("{}").split(","))
        return " ".join(assign(name, f"{TYPES[given[-1]]}(0)") for name in names)
    found = _memory(w, i, given, "kRead")
    if found is None or "release" in given:
        return None
    pointer, kind, count = found
    targets = i.operands[0].strip("{}").split(",")
    if len(targets) != count:
        return None
    loads = " ".join(assign(t.strip(), f"load<{TYPES[kind]}>(p, {k})") for k, t in enumerate(targets))
    return f"{{ const void* p = {pointer}; {loads} }}"


def _store(w: Writer, i: Instruction, given: list[str]) -> str | None:
    found = _memory(w, i, given, "kWrite")
    if found is None or "acquire" in given:
        return None
    pointer, kind, count = found
    sources = i.operands[1].strip("{}").split(",")
    if len(sources) != count:
        return None
    stores = " ".join(f"store(p, {k}, {w.value(s.strip(), kind)});" for k, s in enumerate(sources))
    return f"{{ void* p = {pointer}; {stores} }}"


def _atomic(w: Writer, i: Instruction, given: list[str]) -> str | None:
    op, order, scope, kind = given if len(given) == 4 else ("",) * 4
    if order not in _ORDERS or scope not in _SCOPES or kind not in TYPES or (op not in _RMW and op != "cas"):
        return None
    ctype, how = TYPES[kind], f"kRead|kWrite|kAtomic{_ORDERS[order]}{_SCOPES[scope]}"
    target, place, *sources = i.operands
    values = [w.value(s, kind) for s in sources]
    new = f"a == {values[0]} ? {values[1]} : a" if op == "cas" else _RMW[op]
    second = "" if op == "cas" else f"const {ctype} b = {values[0]}; "
    pointer = f"ptx_access(lane, kGeneric, {w.address(place)}, sizeof({ctype}), {how}, {w.site})"
    load = f"const {ctype} a = load<{ctype}>(p, 0);"
    return f"{{ {second}void* p = {pointer}; {load} store(p, 0, {ctype}({new})); {assign(target, 'a')} }}"


def _branch(w: Writer, i: Instruction, given: list[str]) -> str | None:
    return f"goto {label(i.operands[0])};" if given in ([], ["uni"]) else None


def _shuffle(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if given not in (["sync", mode, "b32"] for mode in ("bfly", "idx", "up")):
        return None
    target, _, valid = i.operands[0].partition("|")
    value, by, clamp, mask = (w.value(o, "u32") for o in i.operands[1:])
    text = (
        f"const Shuffled s = ptx_shuffle_{given[1]}(lane, {value}, {by}, {clamp}, {mask}, {w.site}); "
        f"{assign(target, 's.value')}"
    )
    return f"{{ {text} {register(valid) + ' = s.valid;' if valid else ''} }}"


def _reduce(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if given != ["sync", "max", "u32"]:
        return None
    target, value, mask = i.operands
    return assign(target, f"ptx_reduce_max(lane, {w.value(value, 'u32')}, {w.value(mask, 'u32')}, {w.site})")


def _exactly(opcode: list[str], operands: tuple[str, ...], text: str) -> Callable[..., str | None]:
    def write(w: Writer, i: Instruction, given: list[str]) -> str | None:
        return text.format(site=w.site) if given == opcode and i.operands == operands else None

    return write


def _sync_warp(w: Writer, i: Instruction, given: list[str]) -> str | None:
    if given != ["warp", "sync"]:
        return None
    return f"ptx_warp_barrier(lane, {w.value(i.operands[0], 'u32')}, {w.site});"


def _sleep(w: Writer, i: Instruction, given: list[str]) -> str | None:
    return f"ptx_sleep(lane, {w.site});" if given == ["u32"] else None


_HANDLERS: dict[str, Callable[..., str | None]] = {
    "add": _either(_apply("add({}, {})", INTEGERS), _apply("{} + {}", FLOATS, ("rn",))),
    "sub": _either(_apply("subtract({}, {})", INTEGERS), _apply("{} - {}", FLOATS, ("rn",))),
    "mul": _either(_apply("multiply({}, {})", INTEGERS, ("lo",)), _apply("{} * {}", FLOATS, ("rn",)), _multiply),
    "mad": _apply("add(multiply({}, {}), {})", INTEGERS, ("lo",)),
    "div": _either(_apply("divide({}, {})", INTEGERS), _apply("{} / {}", FLOATS, ("rn",))),
    "rem": _apply("remainder_of({}, {})", INTEGERS),
    "rcp": _apply("{T}(1) / {}", FLOATS, ("rn",)),
    "fma": _either(_apply("std::fma({}, {}, {})", FLOATS, ("rn",)), _apply("fma_down({}, {}, {})", {"f32"}, ("rm",))),
    "ex2": _apply("exp2_flushed({})", {"f32"}, ("approx", "ftz")),
    "neg": _either(_apply("subtract({T}(0), {})", INTEGERS), _apply("-{}", FLOATS)),
    "abs": _apply("std::fabs({})", FLOATS),
    "min": _apply("smaller({}, {})", INTEGERS),
    "max": _apply("larger({}, {})", INTEGERS),
    "and": _apply("{T}({} & {})", BITS),
    "or": _apply("{T}({} | {})", BITS),
    "xor": _apply("{T}({} ^ {})", BITS),
    "not": _either(_apply("!{}", {"pred"}), _apply("{T}(~{})", BITS - {"pred"})),
    "shl": _shift("shift_left", BITS - {"pred"}),
    "shr": _shift("shift_right", INTEGERS),
    "popc": _apply("uint32_t(std::popcount({}))", {"b32", "b64"}),
    "prmt": _apply("permute({}, {}, {})", {"b32"}),
    "bfi": _apply("insert({}, {}, {}, {})", {"b32", "b64"}),
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvt": _convert,
    "cvta": _convert_address,
    "isspacep": _in_space,
    "ld": _either(calls.returned, _load),
    "st": _either(calls.argument, _store),
    "call": calls.call,
    "atom": _atomic,
    "bra": _branch,
    "ret": _exactly([], (), "return;"),
    "bar": _either(_exactly(["sync"], ("0",), "ptx_barrier(lane, {site});"), _sync_warp),
    "shfl": _shuffle,
    "redux": _reduce,
    "nanosleep": _sleep,
    "griddepcontrol": _either(
        _exactly(["launch_dependents"], (), "ptx_let_next_begin(lane, {site});"),
        _exactly(["wait"], (), "ptx_await_launch_before(lane, {site});"),
    ),
    "mbarrier": bulk.mbarrier,
    "cp": bulk.copy,
    "fence": bulk.fence,
}
