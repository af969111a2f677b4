"""One rank of a process group that synchronizes every step with an all-reduce, as ATOM's DP ranks do.

    python -m tests.bench.parts.gloo_rank --rank 0 --size 2 --store /tmp/store --num-steps 2000

Writes the durations of its all-reduces in seconds to stdout, as a JSON list.

Source: `DPEngineCoreProc._sync_dp_state` (atom/model_engine/engine_core.py): five int64, MAX, on Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist

_NUM_WARM_UP_STEPS = 50
_STATE = (0, 64, 64, 1, 0)


def main() -> None:
    """Take part in `--num-steps` all-reduces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True, help="a new file that all ranks share")
    parser.add_argument("--num-steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{args.store}", rank=args.rank, world_size=args.size)
    durations = [_agree() for _ in range(_NUM_WARM_UP_STEPS + args.num_steps)]
    dist.destroy_process_group()
    json.dump(durations[_NUM_WARM_UP_STEPS:], sys.stdout)


def _agree() -> float:
    began_at = time.perf_counter()
    # Allocated anew for every step, as ATOM does.
    state = torch.tensor(_STATE, dtype=torch.int64)
    dist.all_reduce(state, op=dist.ReduceOp.MAX)
    state.tolist()
    return time.perf_counter() - began_at


if __name__ == "__main__":
    main()
