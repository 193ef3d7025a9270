"""The helper that most distributed tests stand on: results, errors, hangs, deaths, nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

from tests.helpers import ranks
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def total(value: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    mine = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(mine)
    return dist.get_rank(), float(mine)


def pid_and_master() -> tuple[int, str]:
    return os.getpid(), os.environ["MASTER_PORT"]


def fail_on_rank_1_while_others_wait() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("the real reason")
    dist.barrier()


def die_on_rank_1() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_for_ever() -> None:
    time.sleep(1000)


def count_rows_with_workers() -> int:
    return sum(len(batch) for batch in DataLoader(list(range(10)), batch_size=3, num_workers=1))


def leave_a_mark() -> str | None:
    before = os.environ.get("HAPI_TEST_MARK")
    os.environ["HAPI_TEST_MARK"] = "left"
    return before


def test_results_come_in_rank_order() -> None:
    assert run_ranks(total, 2, 1.5) == [(0, 4.5), (1, 4.5)]
    assert run_ranks(total, 3, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert run_ranks(total, 1, 2.0) == [(0, 2.0)]


def test_processes_are_reused_and_their_environment_is_not() -> None:
    first, second = run_ranks(pid_and_master, 2), run_ranks(pid_and_master, 2)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert run_ranks(leave_a_mark, 2) == run_ranks(leave_a_mark, 2) == [None, None]
    assert run_ranks(leave_a_mark, 2, env={"HAPI_TEST_MARK": "given"}) == ["given", "given"]


def test_a_rank_may_use_dataloader_workers() -> None:
    assert run_ranks(count_rows_with_workers, 2) == [10, 10]


def test_the_rank_that_raised_is_named_not_the_ones_that_lost_their_peer() -> None:
    run_ranks(pid_and_master, 3)
    pids = ranks._pool.pids()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3.*fail_on_rank_1.*KeyError: 'the real reason'"):
        run_ranks(fail_on_rank_1_while_others_wait, 3)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert [rank for rank, _ in run_ranks(total, 2, 1.0)] == [0, 1]


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed.*\n.*exit code -9"):
        run_ranks(die_on_rank_1, 2)


def test_a_hang_shows_where_the_ranks_are() -> None:
    run_ranks(pid_and_master, 2)
    begun = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)ranks \[0, 1\] of 2 did not finish within 1 s.*sleep_for_ever"):
        run_ranks(sleep_for_ever, 2, timeout=1)
    assert time.monotonic() - begun < 5


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="must be importable and picklable"):
        run_ranks(lambda: None, 2)
