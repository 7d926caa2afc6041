"""Run under torchrun with two ranks: the main process comes late, and the nodes do not share a folder.

torchrun --nproc_per_node 2 tests/distributed_start.py FOLDER_OF_RANK_0 FOLDER_OF_RANK_1
"""

import os
import sys
import time
from pathlib import Path

import load_inputs as load
from fsdp_utils import close_world, init_world

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if rank == 0:
        time.sleep(8)  # it downloads weights, say
    start = time.monotonic()
    world = init_world(tp_size=1, timeout_minutes=0.1)  # 6 seconds
    assert rank == 0 or time.monotonic() - start > 5
    load.SHOWN_AFTER = 0.5
    try:
        load.check_shared(Path(sys.argv[1 + rank]))
    except ValueError as error:
        (Path(sys.argv[1]) / f"error_of_rank_{rank}").write_text(str(error))
    close_world()
