"""Print the ranks of each group of a geometry, as SC25's check_rank_generator.ipynb does."""

from dlscale.config.run import Geometry
from dlscale.parallel.world import arrangement

geometry = Geometry(nodes=8, gpus_per_node=4, tp=2, cp=2, order="tp-cp-dp")
ranks = arrangement(geometry)
for axis, name in enumerate(("dp", "cp", "tp")):
    groups = ranks.movedim(axis, -1).flatten(0, 1)
    print(name, groups[groups[:, 0].argsort()].tolist())
