"""The device `meta`: its tensors have shapes but no values, so whatever reads one fails, unless a test answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

META = torch.device("meta")


def skip_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter launch nothing."""

    def skip_kernel(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: skip_kernel)


class WithoutWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses copies from host memory for which the host would wait."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cpu":
            assert len(args) > 2, "a copy to the device for which the host waits"
            assert args[2], "a copy to the device for which the host waits"
        assert _move(func, args, kwargs) != ("cpu", "meta"), "a copy to the device for which the host waits"
        return func(*args, **kwargs)


class AnsweredReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers copies to the host with ones, and records their shapes. Other reads still fail."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _move(func, args, kwargs) == ("meta", "cpu"):
            self.shapes.append(tuple(args[0].shape))
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Between which types of device `Tensor.to` copies; None for other calls. In inference mode it is another op."""
    if func.overloadpacket not in (torch.ops.aten._to_copy, torch.ops.aten.to):
        return None
    devices = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.device)]
    source = args[0].device
    return source.type, (devices[0] if devices else source).type
