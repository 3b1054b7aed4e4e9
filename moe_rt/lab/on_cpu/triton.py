"""Stand-ins for triton where it is not installed, and refusals of launches where it is: no kernel runs on CPU ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from moe_rt.lab.on_cpu.hooks import NotOnCpu


def _refuse(name: str, where: str = "") -> NoReturn:
    expected = "a path of the program without triton"
    raise NotOnCpu(f"triton kernel {name}{where}: got a launch on CPU ranks, which run no triton; expected {expected}")


class Kernel:
    """A function that triton would compile. It can be configured but not launched."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", str(fn))
        self.__doc__ = getattr(fn, "__doc__", None)
        code = getattr(fn, "__code__", None)
        self._where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        self.arg_names = list(inspect.signature(fn).parameters) if callable(fn) else []

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self.run

    def run(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise NotOnCpu with the kernel's name."""
        _refuse(self.__name__, self._where)

    __call__ = warmup = run


class Name:
    """Any other name of triton: a dtype, a function of the kernel language, a class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotOnCpu(f"{self._name}: got a call on CPU ranks, which have no triton; expected a path without it")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, item: Any) -> Name:
        return self

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return self._name


class Constexpr:
    """triton.language.constexpr, which modules also call outside of kernels."""

    def __init__(self, value: Any) -> None:
        self.value = getattr(value, "value", value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


def fill(module: ModuleType) -> None:
    """Give a stand-in module of triton all names."""
    name = module.__name__

    def find(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return Name(f"{name}.{attribute}")

    module.__dict__["__getattr__"] = find
    module.__dict__["__version__"] = "0.0+moe_rt"  # programs that ask choose their path without kernels
    if name == "triton.language":
        module.__dict__["constexpr"] = Constexpr
    if name == "triton":
        module.__dict__.update(
            jit=_decorator(Kernel),
            autotune=lambda *arguments, **keywords: _kernel,
            heuristics=lambda *arguments, **keywords: _kernel,
            Config=_Config,
            cdiv=lambda x, y: -(-x // y),
            next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
        )


class _Config:
    """A choice of an autotuner, which keeps what it was given."""

    def __init__(self, kwargs: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        self.kwargs = kwargs
        self.__dict__.update(keywords)


def _kernel(fn: Any) -> Kernel:
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def _decorator(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a decorator that is used with or without arguments."""

    def decorate(fn: Any = None, **keywords: Any) -> Any:
        return make if fn is None else make(fn)

    return decorate


def refuse_launches() -> None:
    """Make kernels of an installed triton refuse their launch."""
    for home, kind in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
        getattr(import_module(home), kind).run = _run


def _run(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
    fn = self
    while hasattr(fn, "fn"):
        fn = fn.fn
    _refuse(getattr(fn, "__name__", str(fn)))
