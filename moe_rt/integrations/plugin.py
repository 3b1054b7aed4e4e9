"""What plug-ins of servers share: whether one was chosen, and what is said where the server is not the tested one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from moe_rt.errors import InvalidConfig, MissingPackage


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One server's.

    Attributes:
        variable: of the environment, that chooses it.
        packages: that may hold the server, the likeliest first.
        tested: its release.
        install: how the tested one is installed.
    """

    variable: str
    packages: tuple[str, ...]
    tested: str
    install: str

    def is_chosen(self) -> bool:
        """Whether the variable says so.

        Raises:
            InvalidConfig: it is neither 0 nor 1.
        """
        chosen = os.environ.get(self.variable, "0")
        if chosen not in ("", "0", "1"):
            raise InvalidConfig(f"{self.variable}: got {chosen!r}, expected 1 to send tokens over moe_rt, or 0")
        return chosen == "1"

    def missing(self, error: ImportError) -> MissingPackage:
        """For a server that is not there, or lacks a module."""
        return MissingPackage(f"{self._what_is_here()}: {error}; {self._what_to_do()}")

    def different(self, found: str) -> InvalidConfig:
        """For a server whose interfaces are not the tested ones."""
        return InvalidConfig(f"{self._what_is_here()}: got {found}; {self._what_to_do()}")

    def unserved(self, setting: str, expected: str) -> InvalidConfig:
        """For a setting of the server that moe_rt does not serve."""
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
