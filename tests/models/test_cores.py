"""Cores are shared out so that nobody holds what somebody else holds, and none is left idle."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headway.models.cores import CorePool, FixedCores, SharedCores


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_lone_worker_has_all_cores_and_two_have_half_each() -> None:
    pool = CorePool(4)
    first, second = SharedCores(pool), SharedCores(pool)
    with first.busy():
        with first.unit():
            assert torch.get_num_threads() == 4
        with second.busy(), first.unit():
            assert torch.get_num_threads() == 2
            with second.unit():
                assert torch.get_num_threads() == 2
        with first.unit():
            assert torch.get_num_threads() == 4


def test_who_comes_second_waits_until_the_first_ends_its_unit() -> None:
    pool = CorePool(2)
    first, second = SharedCores(pool), SharedCores(pool)
    order: list[str] = []

    def come_second() -> None:
        with second.busy(), second.unit() as others:
            order.append(f"second with {others}")

    worker = threading.Thread(target=come_second)
    with first.busy():
        with first.unit():
            worker.start()
            time.sleep(0.05)
            order.append("first ends")
        worker.join(timeout=5)
    assert order == ["first ends", "second with 0.5"]


def test_who_wants_all_cores_waits_for_them_and_is_not_overtaken() -> None:
    pool = CorePool(2)
    first, whole = SharedCores(pool), SharedCores(pool, always_all=True)
    order: list[str] = []

    def want_all() -> None:
        with whole.busy(), whole.unit() as held:
            assert torch.get_num_threads() == 2 * held
            order.append(f"whole with {held}")
            time.sleep(0.05)

    worker = threading.Thread(target=want_all)
    with first.busy():
        with first.unit():
            worker.start()
            time.sleep(0.05)
            order.append("first ends")
        with first.unit():
            order.append("first again")
        worker.join(timeout=5)
    assert order == ["first ends", "whole with 1.0", "first again"]


@pytest.mark.parametrize("total", [1, 2, 3, 8])
def test_no_core_is_ever_held_twice(total: int) -> None:
    pool = CorePool(total)
    held, most, lock = [0.0], [0.0], threading.Lock()

    def work(claim: SharedCores) -> None:
        for _ in range(20):
            with claim.busy():
                for _ in range(5):
                    with claim.unit() as mine:
                        with lock:
                            held[0] += mine
                            most[0] = max(most[0], held[0])
                        with lock:
                            held[0] -= mine

    workers = [threading.Thread(target=work, args=(SharedCores(pool),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert not any(worker.is_alive() for worker in workers)
    assert 0 < most[0] <= 1 + 1e-9


def test_fixed_cores_are_fixed() -> None:
    with FixedCores(3).busy(), FixedCores(3).unit() as held:
        assert held == 1
        assert torch.get_num_threads() == 3


def test_with_one_core_both_workers_get_their_turns() -> None:
    pool = CorePool(1)
    num_units, ended = [0, 0], threading.Event()

    def work(number: int) -> None:
        claim = SharedCores(pool)
        with claim.busy():
            while not ended.is_set():
                with claim.unit():
                    num_units[number] += 1
                    time.sleep(0.001)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.3)
    ended.set()
    for worker in workers:
        worker.join(timeout=5)
    assert min(num_units) > 0.8 * max(num_units)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_helpers_are_gone_when_a_worker_has_nothing_to_do():
    """In a process of its own: what other tests have computed leaves threads behind."""
    program = """
import os, torch
from headway.models.cores import FixedCores
cores = FixedCores(2)
with cores.busy():
    with cores.unit():
        before = len(os.listdir("/proc/self/task"))
        torch.ones(1_000_000).exp_()
        helped = len(os.listdir("/proc/self/task"))
print(before, helped, len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    before, helped, after = map(int, done.stdout.split())
    assert helped == before + 1
    assert after == before
