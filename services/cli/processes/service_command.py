"""How a launcher starts a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# In start order; they stop in reverse order, so that no service loses one it depends on.
ROLES = ("worker", "scheduler", "tokenizer")

_LISTEN_FLAGS = (
    *("--listen", "--insecure-bind", "--cell-listen", "--insecure-cell-bind"),
    *("--manage-listen", "--http-listen", "--insecure-http-bind"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """An address on which a process will listen."""

    flag: str
    """What the launcher's user sets it with."""
    address: str


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """How a service is started and where it answers."""

    role: str
    """Its module is `services.ROLE`."""
    flags: tuple[str, ...]
    address: str
    """Its client port's; a worker has only a cell port."""
    domain: str
    """Its failure domain."""
    rank: str = ""
    """A worker's `DP.TP`; empty for a single worker."""
    cell_address: str | None = None
    """Its cell port's, if it has two ports."""
    flag_to_own: Mapping[str, str] = field(default_factory=dict)
    """The launcher's own flags for some of its addresses; others are set by `--ROLE.X`."""

    @property
    def name(self) -> str:
        """Unique within the cell."""
        return f"{self.role} {self.rank}".rstrip()

    @property
    def listeners(self) -> Iterator[Listener]:
        """All its addresses, by the flags that set them."""
        for flag in _LISTEN_FLAGS:
            if (address := find_flag(self.flags, flag)) is not None:
                name = self.flag_to_own.get(flag, f"--{self.role}.{flag.removeprefix('--')}")
                yield Listener(name, address)

    @property
    def health_address(self) -> str:
        """Where the launcher asks for its health: any port answers, and it may call a cell's own."""
        return self.cell_address or self.address


def find_flag(flags: Sequence[str], name: str) -> str | None:
    """The value that a service's flags give a flag, the last one of several; None if there is none."""
    found = None
    for flag, following in zip(flags, (*flags[1:], ""), strict=True):
        own_name, separator, value = flag.partition("=")
        if own_name == name:
            found = (value if separator else following) or None
    return found
