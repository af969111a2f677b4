"""The objects of a fake Kubernetes API server: versions, conflicts, selections, and the history that watches replay."""

from __future__ import annotations

import copy
import itertools
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
# Plural and namespace.
Kind = tuple[str, str]


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }
        self.code = code


@dataclass(frozen=True)
class Change:
    """One write: the object before and after it; None where there was none."""

    version: int
    kind: Kind
    before: Object | None
    after: Object | None

    def event_for(self, selector: dict[str, str]) -> Object | None:
        """What a watch with this selector sees; an object that leaves the selection is deleted for it."""
        was, is_ = (one is not None and matches(one, selector) for one in (self.before, self.after))
        if is_:
            return {"type": "MODIFIED" if was else "ADDED", "object": self.after}
        if not was:
            return None
        assert self.before is not None
        gone = copy.deepcopy(self.after or self.before)
        gone["metadata"]["resourceVersion"] = str(self.version)
        return {"type": "DELETED", "object": gone}


@dataclass
class KubeStore:
    """Objects by kind and name. Every write has a version of its own, and notifies `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int = 100
    _objects: dict[Kind, dict[str, Object]] = field(default_factory=dict)
    _history: list[Change] = field(default_factory=list)
    _oldest: int = 100
    _numbers: Any = field(default_factory=itertools.count)

    def select(self, kind: Kind, selector: dict[str, str]) -> tuple[int, list[Object]]:
        """The version of the list, and the objects selected."""
        with self.changed:
            objects = self._objects.get(kind, {}).values()
            return self.version, [copy.deepcopy(one) for one in objects if matches(one, selector)]

    def create(self, kind: Kind, new: Object) -> Object:
        """Add an object.

        Raises:
            ApiError: 409: there is one of this name.
        """
        with self.changed:
            name = new["metadata"]["name"]
            if name in self._objects.setdefault(kind, {}):
                raise ApiError(409, "AlreadyExists", f"{kind[0]} {name!r} already exists")
            new = copy.deepcopy(new)
            new["metadata"] |= {"namespace": kind[1], "uid": str(uuid.uuid4())}
            return self._write(kind, name, None, new)

    def replace(self, kind: Kind, new: Object) -> Object:
        """Replace an object; what changes nothing keeps its version.

        Raises:
            ApiError: 404: there is none; 409: the caller's version is not the present one.
        """
        with self.changed:
            before = self._find(kind, new["metadata"]["name"])
            expected = new["metadata"].get("resourceVersion")
            if expected not in (None, before["metadata"]["resourceVersion"]):
                raise ApiError(409, "Conflict", "the object has been modified")
            after = copy.deepcopy(new)
            after["metadata"] = before["metadata"] | after["metadata"]
            after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            return before if after == before else self._write(kind, after["metadata"]["name"], before, after)

    def delete(self, kind: Kind, name: str) -> None:
        """Remove an object.

        Raises:
            ApiError: 404: there is none.
        """
        with self.changed:
            self._write(kind, name, self._find(kind, name), None)

    def compact(self) -> None:
        """Forget the history, as a server does after some minutes."""
        with self.changed:
            self._history.clear()
            self._oldest = self.version

    def changes_since(self, version: int, kind: Kind) -> list[Change]:
        """The writes after a version; the caller holds `changed`.

        Raises:
            ApiError: 410: the history does not go back so far; 504: the version is in the future.
        """
        if version < self._oldest:
            raise ApiError(410, "Expired", f"too old resource version: {version} ({self._oldest})")
        if version > self.version:
            raise ApiError(504, "Timeout", f"Too large resource version: {version}, current: {self.version}")
        return [change for change in self._history if change.version > version and change.kind == kind]

    def _find(self, kind: Kind, name: str) -> Object:
        try:
            return self._objects[kind][name]
        except KeyError:
            raise ApiError(404, "NotFound", f"{kind[0]} {name!r} not found") from None

    def _write(self, kind: Kind, name: str, before: Object | None, after: Object | None) -> Object:
        self.version += 1
        if after is None:
            del self._objects[kind][name]
        else:
            after["metadata"]["resourceVersion"] = str(self.version)
            self._objects[kind][name] = after
        self._history.append(Change(self.version, kind, before, after))
        self.changed.notify_all()
        return copy.deepcopy(after or before or {})


def matches(one: Object, selector: dict[str, str]) -> bool:
    """Whether an object has all of these labels."""
    labels = one["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in selector.items())
