"""Many processes: detection of the launcher, collectives for hand-written loops, and strategies."""

from hapi.distributed.collectives import all_gather, all_reduce, barrier, broadcast
from hapi.distributed.ddp import DataParallel, DataParallelStrategy
from hapi.distributed.environment import Environment, detect
from hapi.distributed.group import ParallelEnv, get_rank, get_world_size, init_parallel_env
from hapi.distributed.spawn import SpawnContext, SpawnError, notebook_launch, spawn
from hapi.distributed.strategies import choose
from hapi.distributed.strategy import SingleDevice, Strategy

__all__ = [
    "DataParallel",
    "DataParallelStrategy",
    "Environment",
    "ParallelEnv",
    "SingleDevice",
    "SpawnContext",
    "SpawnError",
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
    "notebook_launch",
    "spawn",
]
