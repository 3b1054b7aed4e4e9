"""Common part of the server plug-ins: reads the variable that enables one, and makes errors for untested servers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from moe_rt.errors import InvalidConfig, MissingPackage


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Plug-in for one server.

    Attributes:
        variable: name of the environment variable that enables it.
        packages: names of packages that may contain the server, the most likely first.
        tested: the tested release.
        install: command that installs the tested release.
    """

    variable: str
    packages: tuple[str, ...]
    tested: str
    install: str

    def is_chosen(self) -> bool:
        """True if the variable enables the plug-in.

        Raises:
            InvalidConfig: the variable is neither 0 nor 1.
        """
        chosen = os.environ.get(self.variable, "0")
        if chosen not in ("", "0", "1"):
            raise InvalidConfig(f"{self.variable}: got {chosen!r}, expected 1 to send tokens over moe_rt, or 0")
        return chosen == "1"

    def missing(self, error: ImportError) -> MissingPackage:
        """Return the error for a server that is not installed or lacks a module."""
        return MissingPackage(f"{self._what_is_here()}: {error}; {self._what_to_do()}")

    def different(self, found: str) -> InvalidConfig:
        """Return the error for a server with other interfaces than the tested release."""
        return InvalidConfig(f"{self._what_is_here()}: got {found}; {self._what_to_do()}")

    def unserved(self, setting: str, expected: str) -> InvalidConfig:
        """Return the error for a setting of the server that moe_rt does not support."""
        return InvalidConfig(f"{self.packages[0]}: got {setting}, expected {expected}; or unset {self.variable}")

    def _what_is_here(self) -> str:
        for package in self.packages:
            try:
                return f"{package} {version(package)}"
            except PackageNotFoundError:
                continue
        return f"no {self.packages[0]}"

    def _what_to_do(self) -> str:
        server = self.packages[0]
        return (
            f"expected the interfaces of {server} {self.tested}: {self.install}, take a newer moe_rt, "
            f"or unset {self.variable}"
        )
