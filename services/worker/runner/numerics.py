"""What a worker's results depend on, as one fingerprint."""

from __future__ import annotations

import hashlib

import numpy as np

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel
from services.worker.ops import Ops
from services.worker.sampling.sampler import SAMPLING_VERSION

_ALONE = RankLayout()


def numerics_fingerprint(loaded: LoadedModel, ops: Ops, layout: RankLayout = _ALONE) -> str:
    """32 hex digits, equal only on workers with bitwise equal results."""
    cache = loaded.model.kv_cache_spec.layers
    cached = sorted({str(tensor.dtype) for layer in cache for tensor in layer})
    formats = [str(loaded.model.dtype), *sorted(each.value for each in loaded.packed_formats)]
    # Sampling depends on numpy and its own version; everything else on the backend, whose `numerics` covers torch, CPU
    # and threads.
    parts = (
        loaded.weights_digest,
        " ".join(formats),
        " ".join(cached),
        ops.name,
        ops.numerics(),
        _layout_numerics(layout, is_exact=ops.is_exact),
        f"numpy-{np.__version__}",
        f"sampling-{SAMPLING_VERSION}",
        *([loaded.model.code] if loaded.model.code else []),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _layout_numerics(layout: RankLayout, *, is_exact: bool) -> str:
    """On an exact backend results do not depend on the placement of experts."""
    has_spread_experts = layout.has_expert_parallel and not is_exact
    return f"tp-{layout.tp_size} ep-{layout.ep_size if has_spread_experts else 1}"
