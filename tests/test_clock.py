"""Virtual time: exact jumps, the end of an instant, deadlocks, and the asyncio one is used to."""

import asyncio
import contextvars
import gc
import random
import time

import pytest

from headway.clock import Bell, Deadlock, rare_collections, run

# Exact jumps


def test_sleeping_moves_the_clock_and_takes_no_time():
    async def program():
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(program(), virtual=True) == 1e6
    assert time.perf_counter() - began < 1.0


def test_time_is_assigned_and_never_accumulated():
    """Ten timers that are set at 0 fire at n x 0.1 exactly; a sum of 0.1s would be 0.9999999999999999."""

    async def program():
        loop, fired = asyncio.get_running_loop(), []
        for number in range(1, 11):
            loop.call_at(number * 0.1, lambda: fired.append(loop.time()))
        await asyncio.sleep(2)
        return fired

    assert run(program(), virtual=True) == [number * 0.1 for number in range(1, 11)]


def test_two_ways_to_one_instant_meet_there():
    """0.5 + 0.25 = 0.75: one sleeps twice, one once, and the end of that instant is after both."""

    async def program():
        loop, seen = asyncio.get_running_loop(), []

        async def sleeper(*durations):
            for duration in durations:
                await asyncio.sleep(duration)
            loop.call_idle(lambda: seen.append(("end", loop.time())))
            seen.append("awake")

        await asyncio.gather(sleeper(0.5, 0.25), sleeper(0.75))
        await asyncio.sleep(1)
        return seen

    assert run(program(), virtual=True) == ["awake", "awake", ("end", 0.75), ("end", 0.75)]


def test_nearby_instants_stay_apart():
    async def program():
        loop, seen = asyncio.get_running_loop(), []
        for when in (1.0, 1.0 + 1e-9, 1.0 - 1e-9):
            loop.call_at(when, lambda when=when: loop.call_idle(lambda: seen.append((when, loop.time()))))
        await asyncio.sleep(2)
        return seen

    expected = [1.0 - 1e-9, 1.0, 1.0 + 1e-9]
    assert run(program(), virtual=True) == [(when, when) for when in expected]


def test_the_clock_never_goes_back():
    async def program():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        fired = loop.create_future()
        loop.call_at(2.0, lambda: fired.set_result(loop.time()))
        return await fired

    assert run(program(), virtual=True) == 5.0


def test_timers_of_one_instant_fire_in_the_order_they_were_set():
    async def program():
        loop, fired = asyncio.get_running_loop(), []
        for name in "abcde":
            loop.call_at(1.0, fired.append, name)
        await asyncio.sleep(1.0)
        return fired

    assert run(program(), virtual=True) == list("abcde")


def test_random_sleeps_wake_in_order_of_time_at_their_own_time():
    async def program():
        loop, pick, woken = asyncio.get_running_loop(), random.Random(0), []

        async def sleeper(duration):
            await asyncio.sleep(duration)
            woken.append((loop.time(), duration))

        await asyncio.gather(*(sleeper(pick.choice([pick.random(), 0.5, 1.0])) for _ in range(300)))
        return woken

    woken = run(program(), virtual=True)
    assert woken == sorted(woken)
    assert all(at == duration for at, duration in woken)


# Cancelled timers


def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    async def program():
        loop, fired = asyncio.get_running_loop(), []
        loop.call_later(3.0, fired.append, "cancelled").cancel()
        late = loop.call_later(9.0, fired.append, "cancelled late")
        await asyncio.sleep(1.0)
        late.cancel()
        await asyncio.sleep(1.0)
        return loop.time(), fired

    assert run(program(), virtual=True) == (2.0, [])


def test_a_timer_may_cancel_its_neighbour_of_the_same_instant():
    async def program():
        loop, fired = asyncio.get_running_loop(), []
        loop.call_at(1.0, lambda: second.cancel())
        second = loop.call_at(1.0, fired.append, "second")
        await asyncio.sleep(2.0)
        return fired

    assert run(program(), virtual=True) == []


# The end of an instant


async def hop(times):
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("hops", [0, 1, 2, 5, 50])
def test_idle_is_after_every_hop_of_the_instant(hops):
    async def program():
        loop, seen = asyncio.get_running_loop(), []
        loop.call_idle(lambda: seen.append("idle"))
        await hop(hops)
        seen.append("hopped")
        await asyncio.sleep(1)
        return seen

    assert run(program(), virtual=True) == ["hopped", "idle"]


def test_idle_is_after_tasks_queues_and_timers_of_the_instant():
    async def program():
        loop, seen, queue = asyncio.get_running_loop(), [], asyncio.Queue(1)

        async def producer():
            for number in range(5):
                await queue.put(number)

        async def consumer():
            for _ in range(5):
                await hop(3)
                seen.append(await queue.get())

        async def at_one():
            loop.call_idle(lambda: seen.append(("idle", loop.time())))
            await asyncio.gather(producer(), consumer())
            await asyncio.sleep(-1)
            loop.call_later(0, seen.append, "timer due now")

        loop.call_at(1.0, lambda: tasks.append(asyncio.ensure_future(at_one())))
        tasks = []
        await asyncio.sleep(2)
        return seen

    assert run(program(), virtual=True) == [0, 1, 2, 3, 4, "timer due now", ("idle", 1.0)]


def test_idle_waits_for_what_an_earlier_idle_call_caused():
    async def program():
        loop, seen = asyncio.get_running_loop(), []

        async def consequence():
            await hop(3)
            seen.append("consequence")

        loop.call_idle(lambda: tasks.append(asyncio.ensure_future(consequence())))
        loop.call_idle(lambda: seen.append("second idle"))
        tasks = []
        await asyncio.sleep(1)
        return seen

    assert run(program(), virtual=True) == ["consequence", "second idle"]


def test_idle_is_before_the_next_instant():
    async def program():
        loop, seen = asyncio.get_running_loop(), []
        loop.call_at(1.0, lambda: seen.append("next instant"))
        loop.call_idle(lambda: seen.append(("idle", loop.time())))
        await asyncio.sleep(2)
        return seen

    assert run(program(), virtual=True) == [("idle", 0.0), "next instant"]


# Deadlock and threads


def test_waiting_for_nothing_is_a_deadlock_that_names_who_waits():
    async def program():
        async with asyncio.TaskGroup() as tasks:
            for name in ("rollout 3", "train step"):
                tasks.create_task(asyncio.Event().wait(), name=name)

    with pytest.raises(Deadlock, match=r"no timer is set and these tasks wait for ever: .*rollout 3, train step"):
        run(program(), virtual=True)


def test_a_deadlock_of_many_names_the_first_of_them():
    async def program():
        await asyncio.gather(
            *(asyncio.create_task(asyncio.Event().wait(), name=f"a{number:02}") for number in range(20))
        )

    with pytest.raises(Deadlock, match=r"a00, a01, .*a06.* \.\.\.$"):
        run(program(), virtual=True)


def test_cancelled_timers_alone_are_a_deadlock_too():
    async def program():
        asyncio.get_running_loop().call_later(1.0, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(program(), virtual=True)


def test_a_deadlocked_program_is_cleaned_up():
    cleaned = []

    async def program():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(Deadlock):
        run(program(), virtual=True)
    assert cleaned == [True]


def test_threads_are_refused():
    async def in_executor():
        await asyncio.get_running_loop().run_in_executor(None, print)

    async def in_thread():
        await asyncio.to_thread(print)

    for program in (in_executor(), in_thread()):
        with pytest.raises(RuntimeError, match="threads have no place on virtual time"):
            run(program, virtual=True)


# The asyncio one is used to


def test_errors_and_results_come_out():
    async def fails():
        await asyncio.sleep(1)
        raise KeyError("mine")

    async def answers():
        return 42

    assert run(answers(), virtual=True) == 42
    with pytest.raises(KeyError, match="mine"):
        run(fails(), virtual=True)


def test_a_timeout_ends_at_its_time():
    async def program():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        first = loop.time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1.5)
        return first, loop.time(), await asyncio.wait_for(asyncio.sleep(1, "in time"), 5)

    assert run(program(), virtual=True) == (2.5, 4.0, "in time")


def test_a_task_group_cancels_the_others():
    async def program():
        ends = []

        async def long():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                ends.append(asyncio.get_running_loop().time())
                raise

        async def short():
            await asyncio.sleep(2)
            raise ValueError("short")

        async def both():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(long())
                tasks.create_task(short())

        with pytest.raises(ExceptionGroup):
            await both()
        return ends

    assert run(program(), virtual=True) == [2.0]


def test_queues_semaphores_locks_and_waits():
    """Four jobs of 1 through a semaphore of two take 2; `wait` sees the first ones at 1."""

    async def program():
        loop, gate, results = asyncio.get_running_loop(), asyncio.Semaphore(2), asyncio.Queue()

        async def job(name):
            async with gate:
                await asyncio.sleep(1)
            await results.put((name, loop.time()))

        jobs = [asyncio.create_task(job(name)) for name in "abcd"]
        done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        first = loop.time(), len(done)
        await asyncio.gather(*jobs)
        return first, [results.get_nowait() for _ in range(results.qsize())]

    first, results = run(program(), virtual=True)
    assert first == (1.0, 2)
    assert results == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_asynchronous_generators_are_closed():
    closed = []

    async def program():
        async def numbers():
            try:
                while True:
                    yield 1
                    await asyncio.sleep(1)
            finally:
                closed.append(True)

        generator = numbers()
        await anext(generator)
        program.keep = generator

    run(program(), virtual=True)
    assert closed == [True]


def test_context_variables_reach_callbacks():
    name = contextvars.ContextVar("name", default="unset")

    async def program():
        name.set("mine")
        seen = []
        asyncio.get_running_loop().call_later(1, lambda: seen.append(name.get()))
        await asyncio.sleep(2)
        return seen

    assert run(program(), virtual=True) == ["mine"]


def test_two_programs_have_two_clocks():
    async def program():
        await asyncio.sleep(3)
        return asyncio.get_running_loop().time()

    assert [run(program(), virtual=True) for _ in range(2)] == [3.0, 3.0]


# The bell, on both clocks

CLOCKS = pytest.mark.parametrize("virtual", [False, True], ids=["wall", "virtual"])


@CLOCKS
def test_a_ring_before_the_wait_is_not_lost(virtual):
    async def program():
        bell = Bell()
        bell.ring()
        await asyncio.wait_for(bell.wait(), 5)

    run(program(), virtual=virtual)


@CLOCKS
def test_several_rings_are_one_wake(virtual):
    async def program():
        bell, wakes = Bell(), 0

        async def listen():
            nonlocal wakes
            while True:
                await bell.wait()
                wakes += 1

        listener = asyncio.create_task(listen())
        for _ in range(3):
            await asyncio.sleep(0.001)
            for _ in range(4):
                bell.ring()
        await asyncio.sleep(0.001)
        listener.cancel()
        return wakes

    assert run(program(), virtual=virtual) == 3


@CLOCKS
def test_a_bell_that_does_not_ring_wakes_nobody(virtual):
    async def program():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Bell().wait(), 0.01)

    run(program(), virtual=virtual)


@CLOCKS
def test_a_cancelled_wait_leaves_no_trouble(virtual):
    async def program():
        bell = Bell()
        waiting = asyncio.create_task(bell.wait())
        await asyncio.sleep(0)
        bell.ring()
        waiting.cancel()
        await asyncio.sleep(0.001)
        return waiting.cancelled()

    assert run(program(), virtual=virtual)


@pytest.mark.parametrize("hops", [1, 5, 20])
def test_on_virtual_time_the_bell_wakes_after_all_reports_of_the_instant(hops):
    async def program():
        bell, reports = Bell(), []

        async def report(name, hops):
            await asyncio.sleep(1)
            await hop(hops)
            reports.append(name)
            bell.ring()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(report("early", 0))
            tasks.create_task(report("late", hops))
            await bell.wait()
            return list(reports), asyncio.get_running_loop().time()

    assert run(program(), virtual=True) == (["early", "late"], 1.0)


# What a long simulation costs


def test_timers_that_were_cancelled_leave_nothing():
    """Ten thousand deadlines far ahead, each met; and the timers that are still wanted fire in their order."""

    async def program():
        loop, fired = asyncio.get_running_loop(), []
        wanted = [loop.call_at(1e6 + number, fired.append, number) for number in range(5)]
        for _ in range(10_000):
            deadline = loop.call_later(2e6, fired.append, "deadline")
            await asyncio.sleep(0.01)
            deadline.cancel()
        num_kept = len(loop._timers)
        wanted[2].cancel()
        await asyncio.sleep(1e7)
        return num_kept, fired

    num_kept, fired = run(program(), virtual=True)
    assert num_kept < 300
    assert fired == [0, 1, 3, 4]


def test_cyclic_garbage_is_looked_for_less_often_and_least_on_virtual_time():
    async def program():
        return gc.get_threshold(), gc.get_freeze_count()

    before = gc.get_threshold(), gc.get_freeze_count()
    (virtual, _), (wall, num_left_out) = run(program(), virtual=True), run(program())
    assert virtual[0] > wall[0] > before[0][0]
    assert num_left_out > 10_000, "what was there before"
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_what_runs_leave_behind_does_not_pile_up():
    """Each leaves a cycle that only a look among the old objects finds."""

    async def program():
        kept: list[object] = [[] for _ in range(300)]
        kept.append(kept)

    def num_objects_after(num_runs):
        for _ in range(num_runs):
            run(program(), virtual=True)
        return len(gc.get_objects())

    start = num_objects_after(1)
    assert num_objects_after(3000) < start + 500_000, "900,000 without"


def test_a_collector_that_is_off_stays_off():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections(1000):
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
