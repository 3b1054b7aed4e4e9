"""Makes an op from its declaration, one function: its signature is the op's schema, its body the shapes of the outputs.

Generated from it are the op in torch's dispatcher (implementation, fake, gradients or their refusal) and the function
that buffers call. torch's dispatcher, and the Python that it runs around an op for autograd, take several times as long
as exchanging one token. They are needed only to trace, transform or observe ops; such ops name a buffer by its engine's
id, an integer that a graph can hold. In all other cases the function calls the engine directly, with the same formulas.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    _are_functorch_transforms_active,
    _get_function_stack_at,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import unwrap_if_dead  # noqa: F401, which the generated functions call
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from moe_rt.engine.engine import engine_by_id
from moe_rt.errors import Op
from moe_rt.ops.autograd import Gradient, Refusals, register_gradient, register_lossy, register_once
from moe_rt.ops.compile import kept_in_order

P = ParamSpec("P")
R = TypeVar("R")
OPS: dict[str, TorchOp] = {}
_TYPES = {
    "Engine": "int",
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "int | None": "int?",
    "int | torch.SymInt": "SymInt",
}
_NAMES = {"recv_plan": "handle.recv_plan", "send_plan": "handle.send_plan"}  # of inputs, in errors
_lib = torch.library.Library("moe_rt", "FRAGMENT")
_overloads: list[OpOverload] = []


def unwatched(*tensors: Tensor) -> bool:
    """True if torch's dispatcher would only call the engine: eager mode, plain tensors, no modes, no profiler."""
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return False
    for t in tensors:  # noqa: SIM110, as a generator would take longer than all the checks above
        if type(t) is not Tensor:
            return False
    return True


def in_function_mode() -> bool:
    """True if a TorchFunctionMode would see the op. A default device is such a mode also, and concerns factories only:
    the dispatcher would call it for each operation of Python around the op."""
    return any(type(_get_function_stack_at(i)) is not DeviceContext for i in range(_len_torch_function_stack()))


def without_modes(run: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
    """Run a method of an engine without the default device, which Python would ask about each attribute of a tensor."""
    with DisableTorchFunction():
        return run(*args, **named)


def recorded(*tensors: Tensor | None) -> bool:
    """True if autograd would record a Function of these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def op(
    kind: Op,
    *,
    differentiable: tuple[str, ...],
    gradient: Gradient | None = None,
    method: str = "",
    require_no_loss: str = "",
    require_traceable: str = "",
    names: dict[str, str] | None = None,
    begins: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an op by a function (inputs, engine, tag, options) -> outputs of the right shapes, as torch's fakes.

    Args:
        kind: the op of the protocol, which errors name.
        differentiable: the floating inputs that may require gradients.
        gradient: how autograd differentiates the op. None: a second derivative, which is refused.
        method: the engine's method, which takes the same arguments without `engine`. "": that of the same name.
        require_no_loss: the engine's method that takes `tag` and the differentiable inputs, and refuses those whose
            gradients would be lost; with `gradient`, only called if there are any.
        require_traceable: the engine's method that takes `tag` and the first input, and refuses what no graph can hold.
        names: names of inputs in errors, if no input is None.
        begins: the op is a first half, so that its second half has the gradients.

    Returns:
        A decorator, which returns the function that buffers call: it has the declared signature, and runs the op.
    """

    def declare(shapes: Callable[P, R]) -> Callable[P, R]:
        made = TorchOp(shapes, kind, method or shapes.__name__, require_traceable, names or {})
        OPS[made.name] = made
        texts, refusals = made.texts(differentiable), Refusals(made.name, kind, made.engine_at)
        texts["require"] = f"engine.{require_no_loss}(tag, {texts['differentiable']})" if require_no_loss else "pass"
        texts["record"] = "watched({arguments})" if gradient is None else "record({unwrapped})"
        texts["record"] = texts["record"].format_map(texts)
        template = _CALL
        if gradient is not None:
            made.require_no_loss, made.differentiable = require_no_loss, differentiable
            made.function = made.make_function(gradient, texts)
            made.record = super(torch.autograd.Function, made.function).apply
            register_gradient(_lib, refusals, gradient, made.function.backward)
        elif require_no_loss or begins:
            template = _LOSSY_CALL
            register_lossy(_lib, refusals, made.caller_of(require_no_loss, differentiable))
        else:
            register_once(_lib, refusals)
        call = _compiled(template, texts, watched=made.watched, record=made.record)[made.name]
        call.__doc__ = f"Run torch.ops.moe_rt.{made.name}. {shapes.__doc__}"
        return cast(Callable[P, R], call)

    return declare


def halves(
    whole: str,
    *,
    gradient: Gradient | None = None,
    differentiable: tuple[str, ...] = (),
    require_no_loss: str = "",
    require_traceable: str = "",
) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """Declare the halves of an op that is declared: NAME_begin with its arguments, which returns the ticket of the op
    under way; and NAME_finish, which takes the ticket before them and returns what the op returns.

    Args:
        whole: name of the op.
        gradient: that of the op, which the second half has.
        differentiable: the inputs that may require gradients.
        require_no_loss, require_traceable: as for `op`, of the first half.
    """
    made = OPS[whole]
    signature, names = made.signature, made.names
    ticket = inspect.Parameter("ticket", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor")

    def begin(*args: Any) -> Tensor:
        first: Tensor = args[0]
        return first.new_empty(1, dtype=torch.int32)

    def finish(_: Tensor, *args: Any) -> Any:
        return made.shapes(*args)

    for half, text in ((begin, "Start it, and return its ticket."), (finish, "Wait for it.")):
        half.__name__, half.__doc__ = f"{whole}_{half.__name__}", text
    begin.__signature__ = signature.replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    finish.__signature__ = signature.replace(parameters=[ticket, *made.parameters])  # type: ignore[attr-defined]
    call_begin = op(
        made.kind,
        differentiable=differentiable,
        require_no_loss=require_no_loss,
        require_traceable=require_traceable,
        names=names,
        begins=True,
    )(begin)
    after = None if gradient is None else gradient.after_ticket()
    return call_begin, op(made.kind, differentiable=differentiable, gradient=after, names=names)(finish)


class TorchOp:
    """A declared op in torch's dispatcher. Its inputs come first, then `engine`, `tag` and options, then an output."""

    function: Any = None  # the autograd.Function of calls past the dispatcher, if the op has one
    record: Any = None  # its `apply` without what torch does there for torch.func, which takes a fifth of the time
    # Method of the engine that refuses inputs whose gradients would be lost, if the op has a Function.
    require_no_loss = ""
    differentiable: tuple[str, ...] = ()

    def __init__(
        self, shapes: Callable[..., Any], kind: Op, method: str, require_traceable: str, names: dict[str, str]
    ) -> None:
        self.name, self.kind, self.method = shapes.__name__, kind, method
        self.shapes, self._require_traceable, self.names = shapes, require_traceable, names
        self.signature = inspect.signature(shapes)
        self.parameters = list(self.signature.parameters.values())
        self.inputs = [p.name for p in self.parameters if p.annotation.startswith("Tensor")]
        self.optional = {p.name for p in self.parameters if "None" in p.annotation}
        self.engine_at = [p.name for p in self.parameters].index("engine")
        _lib.define(self.schema())
        for key in ("CPU", "CUDA"):  # the engine knows its device
            _lib.impl(self.name, self._run, key)
        self.overload: OpOverload = getattr(torch.ops.moe_rt, self.name).default
        _overloads.append(self.overload)
        torch.library.register_fake(f"moe_rt::{self.name}", kept_in_order(_overloads, self._fake), lib=_lib)

    def schema(self) -> str:
        """Return the op's schema for torch.library."""
        texts = []
        for p in self.parameters:
            kind = "*, Tensor(a!)" if p.kind is p.KEYWORD_ONLY else _TYPES[p.annotation]
            texts.append(f"{kind} {p.name}" if p.default is p.empty else f"{kind} {p.name}={p.default}")
        outputs = self.signature.return_annotation.replace("tuple[", "(").replace("]", ")")
        return f"{self.name}({', '.join(texts)}) -> {outputs.replace('None', '()')}"

    def _run(self, *args: Any, **written: Tensor) -> Any:
        """Run the op on the engine with the id that `args` hold."""
        at = self.engine_at
        engine = engine_by_id(args[at])
        if self._require_traceable:
            getattr(engine, self._require_traceable)(args[at + 1], args[0])
        result = getattr(engine, self.method)(*args[:at], *args[at + 1 :], **written)
        return None if written else result

    def _fake(self, *args: Any, **written: Tensor) -> Any:
        at = self.engine_at
        return self.shapes(*args[:at], engine_by_id(args[at]), *args[at + 1 :], **written)

    def watched(self, *args: Any, **written: Tensor) -> Any:
        """Call the op in the dispatcher, unless that would reject an argument before the engine sees it."""
        at = self.engine_at
        engine, tag = args[at], args[at + 1]
        given = dict(zip(self.inputs, (*args[: len(self.inputs) - len(written)], *written.values()), strict=True))
        tensors = {name: t for name, t in given.items() if t is not None or name not in self.optional}
        names = _NAMES | self.names if len(tensors) == len(given) else _NAMES
        named = {names.get(name, name): t for name, t in tensors.items()}
        engine.require_call(self.kind, tag, *args[at + 2 :], **named)
        if self.require_no_loss and not (is_dynamo_compiling() or _are_functorch_transforms_active()):
            inputs = [given[name] for name in self.differentiable]
            if type(inputs[0]) is Tensor and recorded(*inputs):  # others have no memory that could be lost
                getattr(engine, self.require_no_loss)(tag, *inputs)
        return self.overload(*args[:at], engine.id, *args[at + 1 :], **written)

    def caller_of(self, method: str, names: tuple[str, ...]) -> Callable[..., None]:
        """Return a function of the op's arguments in the dispatcher: it calls the engine's method with these inputs, or
        nothing if `method` is ""."""

        def call(*args: Any, **written: Tensor) -> None:
            if not method:
                return
            given = dict(zip(self.inputs, args, strict=False)) | written
            getattr(engine_by_id(args[self.engine_at]), method)(args[self.engine_at + 1], *(given[n] for n in names))

        return call

    def texts(self, differentiable: tuple[str, ...]) -> dict[str, str]:
        """Return the parts of the generated functions' text."""
        names = [p.name for p in self.parameters]
        passed = {p.name: f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in self.parameters}
        unwrapped = {
            n: f"{n} if {n} is None else unwrap_if_dead({n})" if n in self.optional else f"unwrap_if_dead({n})"
            for n in self.inputs
        }
        first = self.inputs[0]
        return {
            "name": self.name,
            "method": self.method,
            "parameters": ", ".join(f"*, {name}" if passed[name] != name else name for name in names),
            "arguments": ", ".join(passed.values()),
            "given": ", ".join(text for name, text in passed.items() if name != "engine"),
            "unwrapped": ", ".join(unwrapped.get(name, text) for name, text in passed.items()),
            "inputs": ", ".join(self.inputs),
            "tensors": ", ".join(f"{first} if {n} is None else {n}" if n in self.optional else n for n in self.inputs),
            "differentiable": ", ".join(differentiable),
            "placed": ", ".join(name if name in differentiable else "None" for name in names),
        }

    def make_function(self, gradient: Gradient, texts: dict[str, str]) -> Any:
        """Return the autograd.Function that calls the engine. It saves in forward: if it had a setup_context, torch
        would bind the arguments by name, which takes longer than the op."""
        made = _compiled(_FUNCTION, texts, save=gradient.save, differentiate=gradient.differentiate)
        methods = {name: staticmethod(made[name]) for name in ("forward", "backward")}
        return type(f"{self.name.title()}Function", (torch.autograd.Function,), methods)


# Text costs a call nothing, while a closure that handles any number of arguments takes half a microsecond longer.
_CALL = """
def {name}({parameters}):
    if unwatched({tensors}) and not ((modes := _len_torch_function_stack()) and in_function_mode()):
        if recorded({differentiable}):
            {require}
            return {record}
        return without_modes(engine.{method}, {given}) if modes else engine.{method}({given})
    return watched({arguments})
"""
_LOSSY_CALL = """
def {name}({parameters}):
    {require}
    if unwatched({tensors}) and not ((modes := _len_torch_function_stack()) and in_function_mode()):
        return without_modes(engine.{method}, {given}) if modes else engine.{method}({given})
    return watched({arguments})
"""
_FUNCTION = """
def forward(ctx, {parameters}):
    modes = _len_torch_function_stack()
    output = without_modes(engine.{method}, {given}) if modes else engine.{method}({given})
    save(ctx, engine, tag, output, ({inputs}))
    return output

def backward(ctx, *grads):
    ({differentiable},) = differentiate(ctx, *grads)
    return {placed}
"""


def _compiled(template: str, texts: dict[str, str], **used: Any) -> dict[str, Any]:
    """Return the functions of a template by name; `used` are their free variables."""
    body = textwrap.indent(template.format_map(texts), "    ")
    text = f"def make({', '.join(used)}):\n{body}\n    return locals()"
    made: dict[str, Any] = {}
    exec(compile(text, f"<moe_rt::{texts['name']}>", "exec"), globals(), made)
    return made["make"](**used)
