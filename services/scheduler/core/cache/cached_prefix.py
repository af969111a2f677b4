"""A sequence's place in the tree of cached prefixes; see `prefix_cache`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

NO_BLOCKS: BlockIds = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of contents: the tokens of one block each, following all those on the path to it.

    Invariant: `blocks[i]` is the block that holds content `start + i` of the path, or -1. The last one is present, or
    the node has children. What is beyond `num_blocks` is meaningless. The root of a salt holds no content.
    """

    id: int
    parent: PrefixNode | None
    key: bytes
    """The tokens of its first block, under which its parent lists it; for a root, the salt."""
    start: int
    tokens: bytes
    blocks: BlockIds
    num_blocks: int
    num_present: int
    """Number of `blocks` that are not -1."""
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    num_cuts: int = 0
    """Incremented by changes that void cursors at its end."""
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    """Hashes of its first contents, as far as outsiders had to be told of them; see `kv_feed`."""


@dataclass(slots=True)
class PrefixCursor:
    """How many of a sequence's first blocks were found or published: `num_blocks`.

    Invariant: unless `node` was cut since, the first `depth` blocks lead to its end.
    """

    era: object = None
    salt: bytes = b""
    node: PrefixNode | None = None
    num_cuts: int = 0
    depth: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class CachedPrefix:
    """Blocks whose KV a sequence can share, and the cursor after them.

    Valid only while the cache's version equals `version`. Must not be modified.
    """

    version: object
    block_ids: BlockIds
    cursor: PrefixCursor
    num_tokens: int
    checkpoint: int | None = None
    """The checkpoint of the recurrent state after these tokens; None if there are none."""
    awaits_state: bool = False
    """Whether a step in flight saves a state with which more could be shared."""
    num_lost_tokens: int = 0
    """Cached tokens after these that cannot be shared for want of a state."""
