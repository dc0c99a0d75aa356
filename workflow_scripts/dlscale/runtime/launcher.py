"""How a stage's command becomes processes."""

from __future__ import annotations

from dlscale.runtime.schema.run import Geometry


def launch(geometry: Geometry) -> list[str]:
    """Return the words that start `dlscale` with a process for each device of one node.

    One process is started as it is; several by torchrun, which ends all when one fails.
    """
    if geometry.world_size == 1 or geometry.nodes > 1:
        return ["python", "-m", "dlscale"]
    starter = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={geometry.gpus_per_node}"]
    # What follows "--" is the stage's own: torchrun would read `--log` as one of its options.
    return [*starter, "-m", "--", "dlscale"]
