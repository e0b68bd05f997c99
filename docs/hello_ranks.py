"""Every rank says who it is. On two ranks: hccl-fusion run -n 2 docs/hello_ranks.py"""

import hccl_fusion
from hccl_fusion.groups import create_group, get_rank_id, get_rank_size

hccl_fusion.init()
rank, size = hccl_fusion.rank(), hccl_fusion.size()
print(f"rank {rank} of {size}, session target {'none' if size == 1 else 'grpc://…'}")
if rank == size - 1:
    create_group("last", 1, [rank])
    print(f"rank {get_rank_id('last')} of {get_rank_size('last')} in the group of the last rank")
hccl_fusion.shutdown()
