"""Where a sequence stands in the tree of cached prefixes; see `prefix_cache`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

NO_BLOCKS: BlockIds = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of contents, each the tokens of one block behind all those on the way here.

    Invariant: `blocks[i]` is the block that holds content `start + i` of the path, or none; `num_present` of them are.
    The last one is present, or the node has children. Tokens and blocks behind `num_blocks` mean nothing. The root of
    a salt holds no content.
    """

    id: int
    parent: PrefixNode | None
    key: bytes
    """The tokens of its first block, by which its parent knows it; of a root the salt."""
    start: int
    tokens: bytes
    blocks: BlockIds
    num_blocks: int
    num_present: int
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    num_cuts: int = 0
    """Counts what makes cursors at its end void: that it became shorter or longer, or went."""


@dataclass(slots=True)
class PrefixCursor:
    """How far a sequence's blocks are found or published, from the first one on: `num_blocks`.

    Invariant: unless `node` was cut since, the sequence's first `depth` blocks lead to its end.
    """

    era: object = None
    salt: bytes = b""
    node: PrefixNode | None = None
    num_cuts: int = 0
    depth: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class CachedPrefix:
    """Blocks whose KV a sequence can share, in order, and the cursor behind the last of them.

    It is what the cache holds as long as the cache's version is the one noted here. Nothing of it is to be changed.
    """

    version: object
    block_ids: BlockIds
    cursor: PrefixCursor
    num_tokens: int
