"""The parts of a control plane that run without Kubernetes' own binaries."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from tests.support.kubernetes.control_plane import (
    api_server_flags,
    find_binary,
    missing_binaries,
    run_api_server,
    run_etcd,
)


@pytest.mark.skipif(bool(missing_binaries("etcd")), reason=missing_binaries("etcd"))
def test_etcd_serves_and_is_of_a_release_that_the_flags_are_for(tmp_path: Path) -> None:
    with run_etcd(tmp_path) as url:
        with urllib.request.urlopen(f"{url}/version") as answer:
            version = json.loads(answer.read())["etcdserver"]
        assert version.startswith("3.")
    assert api_server_flags(tmp_path, url, 1)["watch-cache"] == "false"


def test_a_binary_is_that_of_the_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("KUBERNETES_BIN", raising=False)
    assert missing_binaries("kube-apiserver") == "no kube-apiserver in KUBERNETES_BIN or on the PATH"
    (tmp_path / "kube-apiserver").touch(mode=0o755)
    monkeypatch.setenv("KUBERNETES_BIN", str(tmp_path))
    assert find_binary("kube-apiserver") == tmp_path / "kube-apiserver"
    assert missing_binaries("kube-apiserver") == ""


@pytest.mark.skipif(bool(missing_binaries("etcd")), reason=missing_binaries("etcd"))
def test_an_api_server_that_ends_is_said_to_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kube-apiserver").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "kube-apiserver").chmod(0o755)
    etcd = find_binary("etcd")
    assert etcd is not None
    monkeypatch.setenv("KUBERNETES_BIN", f"{tmp_path}{os.pathsep}{etcd.parent}")
    with pytest.raises(AssertionError, match="has ended"), run_api_server(tmp_path):
        pass
