"""Many processes: detection of the launcher, collectives for hand-written loops, and strategies."""

from hapi.distributed.collectives import all_gather, all_reduce, barrier, broadcast
from hapi.distributed.environment import Environment, detect
from hapi.distributed.group import ParallelEnv, get_rank, get_world_size, init_parallel_env
from hapi.distributed.strategies import choose
from hapi.distributed.strategy import SingleDevice, Strategy

__all__ = [
    "Environment",
    "ParallelEnv",
    "SingleDevice",
    "Strategy",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "choose",
    "detect",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
]
