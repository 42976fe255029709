"""The published tables of the lane model, through `headway.simulation.simulate`: 400 steps, the first 60 left out.

Lengths have mean 1: exponential, lognormal of sigma 1, or that cut at 8; lanes, batch and train time stand in each row.
Their seeds are not ours, so a figure agrees if the mean over our five seeds is within

    6 s sqrt(1/5 + 1/n) + half a unit of the last printed digit

of it: six standard errors of the difference of two means. s is the standard deviation over our seeds, and the table's
figure is the mean over its own n: five in STEADY, not stated for the others, so one. Six, because s itself is known
from five numbers only (Student's t with four degrees of freedom exceeds 6 four times in a thousand). Five numbers can
also lie together by chance: s is taken to be 0.7 % of the figure at least, which is about what it is for most of them.

Everyday some rows of each table are run; all of them with the slow tests.
"""

from dataclasses import replace
from math import sqrt
from random import Random
from statistics import fmean, stdev

import pytest

from headway.config import resolve
from headway.schedule.ledger import Ledger
from headway.simulation import simulate
from tests.golden.steady_state import Workload, of_all_seeds


def rows(table):
    """Lines of words -> (workload, published figures as printed)."""
    for line in table.strip().splitlines():
        lengths, lanes, batch_size, train_time, run_ahead, *published = line.split()
        yield Workload(lengths, int(lanes), int(batch_size), float(train_time), int(run_ahead)), published


def some(table, *starts):
    """The rows that begin with one of these words (lengths, lanes, batch, train time, run_ahead)."""
    lines = [line for line in table.strip().splitlines() if any(line.split()[:5] == start.split() for start in starts)]
    assert len(lines) == len(starts)
    return "\n".join(lines)


def allowed(figures, published, num_seeds):
    digits, spread = len(published.partition(".")[2]), max(stdev(figures), 0.007 * float(published))
    return 6 * spread * sqrt(1 / len(figures) + 1 / num_seeds) + 0.5 * 10**-digits + 1e-9


def differences(workloads, published, names, num_seeds):
    """What does not agree, in words. names: of the published figures, in the order of the columns; None for none."""
    found = []
    for workload, printed, figures in zip(workloads, published, of_all_seeds(workloads), strict=True):
        for name, value in zip(names, printed, strict=True):
            if name is None:
                continue
            ours, most = fmean(figures[name]), allowed(figures[name], value, num_seeds)
            if abs(ours - float(value)) > most:
                found.append(f"{workload}: {name} {ours:.5g}, published {value}, allowed {most:.2g}")
    return found


def test_a_figure_that_is_off_by_more_than_the_seeds_spread_is_told():
    assert allowed([1.0, 1.1, 0.9, 1.05, 0.95], "1.00", 5) == pytest.approx(6 * 0.0790569 * sqrt(0.4) + 0.005)
    workload = replace(Workload("exp", 8, 8, 0.5, 0), steps=30, warm_up=5)
    (found,) = differences([workload], [["99.99", "0.000"]], ("throughput", "mean_lag"), 5)
    assert "throughput" in found


# Throughput, utilisation, lag: lengths, lanes, batch, train time, run_ahead | samples per time, lane and trainer
# utilisation, mean lag, P(lag > run_ahead), mean length of the trained. Rows 5 to 7 differ from 4 and 8 in the P alone.

STEADY = """
exp       64 64 0.5  0  12.14 0.190 0.095 0.000 0.0000 1.000
exp       64 64 0.5  1  57.86 0.904 0.452 1.000 0.2210 1.000
exp       64 64 0.5  2  63.99 1.000 0.500 1.500 0.1413 1.000
exp       64 64 0.5  3  63.99 1.000 0.500 1.500 0.0514 1.000
exp       64 64 0.5  4  63.99 1.000 0.500 1.500 0.0190 1.000
exp       64 64 0.5  8  63.99 1.000 0.500 1.500 0.0003 1.000
exp       64 64 1.0  0  11.09 0.173 0.173 0.000 0.0000 1.000
exp       64 64 1.0  1  46.79 0.731 0.731 1.000 0.1894 1.000
exp       64 64 1.0  2  62.76 0.981 0.981 1.980 0.2259 1.000
exp       64 64 1.0  3  63.63 0.995 0.994 2.559 0.1587 1.000
exp       64 64 1.0  4  63.77 0.998 0.996 2.881 0.0931 1.000
exp       64 64 1.0  8  63.82 1.000 0.997 3.072 0.0024 1.000
exp       64 32 0.25 0   7.43 0.116 0.058 0.000 0.0000 0.997
exp       64 32 0.25 1  39.20 0.611 0.306 1.000 0.2459 0.997
exp       64 32 0.25 2  60.71 0.945 0.474 1.999 0.2842 0.996
exp       64 32 0.25 3  64.23 1.000 0.502 2.502 0.2265 0.996
exp       64 32 0.25 4  64.23 1.000 0.502 2.502 0.1349 0.996
exp       64 32 0.25 8  64.23 1.000 0.502 2.502 0.0183 0.996
exp       64 32 0.5  0   7.02 0.109 0.110 0.000 0.0000 0.997
exp       64 32 0.5  1  33.14 0.516 0.518 1.000 0.2353 0.997
exp       64 32 0.5  2  52.87 0.823 0.826 1.999 0.2695 0.996
exp       64 32 0.5  3  62.54 0.974 0.977 2.976 0.2826 0.996
exp       64 32 0.5  4  63.55 0.990 0.993 3.662 0.2478 0.996
exp       64 32 0.5  8  63.79 0.999 0.997 4.652 0.0700 0.996
lognormal 64 64 0.5  0   8.44 0.132 0.066 0.000 0.0000 1.001
lognormal 64 64 0.5  1  57.42 0.898 0.449 1.000 0.1801 1.001
lognormal 64 64 0.5  2  63.94 1.000 0.500 1.499 0.1203 1.001
lognormal 64 64 0.5  3  63.94 1.000 0.500 1.499 0.0551 1.001
lognormal 64 64 0.5  4  63.94 1.000 0.500 1.499 0.0293 1.001
lognormal 64 64 0.5  8  63.94 1.000 0.500 1.499 0.0049 1.001
capped    64 64 0.5  0   9.80 0.151 0.077 0.000 0.0000 0.983
capped    64 64 0.5  1  58.25 0.895 0.455 1.000 0.1841 0.983
capped    64 64 0.5  2  65.09 1.000 0.508 1.507 0.1250 0.984
capped    64 64 0.5  3  65.09 1.000 0.508 1.507 0.0575 0.984
capped    64 64 0.5  4  65.09 1.000 0.508 1.507 0.0307 0.984
capped    64 64 0.5  8  65.09 1.000 0.508 1.507 0.0030 0.984
lognormal 64 32 0.25 0   5.66 0.088 0.044 0.000 0.0000 0.997
lognormal 64 32 0.25 1  39.74 0.619 0.310 0.999 0.2063 0.996
lognormal 64 32 0.25 2  60.54 0.943 0.473 2.000 0.2329 0.997
lognormal 64 32 0.25 3  64.22 1.000 0.502 2.499 0.1858 0.996
lognormal 64 32 0.25 4  64.22 1.000 0.502 2.499 0.1183 0.996
lognormal 64 32 0.25 8  64.22 1.000 0.502 2.499 0.0290 0.996
capped    64 32 0.25 0   6.15 0.094 0.048 0.000 0.0000 0.982
capped    64 32 0.25 1  40.20 0.617 0.314 1.000 0.2107 0.982
capped    64 32 0.25 2  61.32 0.941 0.479 2.000 0.2371 0.982
capped    64 32 0.25 3  65.17 1.000 0.509 2.505 0.1900 0.982
capped    64 32 0.25 4  65.17 1.000 0.509 2.505 0.1213 0.982
capped    64 32 0.25 8  65.17 1.000 0.509 2.505 0.0300 0.982
"""

STEADY_NAMES = ("throughput", "lanes", "trainer", "mean_lag", "beyond", "length")


def steady(table):
    workloads, published = zip(*rows(table), strict=True)
    return differences(workloads, published, STEADY_NAMES, num_seeds=5)


def test_throughput_utilisation_and_lag_are_as_published():
    assert not steady(some(STEADY, "exp 64 32 0.25 2", "capped 64 32 0.25 4"))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["exp", "lognormal", "capped"])
def test_throughput_utilisation_and_lag_are_as_published_in_every_row(lengths):
    assert not steady("\n".join(line for line in STEADY.splitlines() if line.startswith(lengths)))


# Order started, the "strict" queue: | samples per time, lane utilisation, mean lag

STARTED = """
exp       64 64 0.5  1  23.03 0.359 1.000
exp       64 64 0.5  2  32.84 0.513 1.990
exp       64 64 0.5  4  49.68 0.776 3.842
exp       64 64 0.5  8  63.01 0.986 5.635
capped    64 64 0.5  1  18.55 0.285 1.000
capped    64 64 0.5  2  26.68 0.410 1.996
capped    64 64 0.5  4  41.67 0.640 3.920
capped    64 64 0.5  8  64.12 0.986 7.184
"""


def in_order_of_start(table):
    workloads, published = zip(*rows(table), strict=True)
    workloads = [replace(workload, rules=("--order=started",)) for workload in workloads]
    return differences(workloads, published, ("throughput", "lanes", "mean_lag"), num_seeds=1)


def test_the_price_of_training_in_order_of_start_is_as_published():
    assert not in_order_of_start(some(STARTED, "capped 64 64 0.5 1"))


@pytest.mark.slow
def test_the_price_of_training_in_order_of_start_is_as_published_in_every_row():
    assert not in_order_of_start(STARTED)


# Dropping what is older than run_ahead: | dropped share, mean length of the trained and of the dropped, trained/true
# mean length, samples per time. Trained/true is the trained length over that of the seeds at hand.

DROPPED = """
exp       64 64 0.5  1  0.1696 0.650  2.72 0.651 49.02
exp       64 64 0.5  2  0.1061 0.741  3.17 0.743 57.23
exp       64 64 0.5  3  0.0439 0.857  4.07 0.860 61.29
exp       64 64 0.5  4  0.0175 0.927  4.99 0.930 62.95
exp       64 64 0.5  6  0.0025 0.983  6.92 0.985 63.95
exp       64 64 0.5  8  0.0003 0.995  9.31 0.998 64.13
exp       64 32 0.25 1  0.1945 0.610  2.58 0.614 33.02
exp       64 32 0.25 2  0.2096 0.588  2.52 0.593 48.86
exp       64 32 0.25 3  0.1612 0.651  2.78 0.655 54.02
exp       64 32 0.25 4  0.1038 0.736  3.21 0.741 57.77
exp       64 32 0.25 6  0.0429 0.854  4.09 0.860 61.75
exp       64 32 0.25 8  0.0171 0.922  5.01 0.929 63.40
lognormal 64 64 0.5  1  0.1480 0.619  3.20 0.617 50.02
lognormal 64 64 0.5  2  0.0963 0.693  3.90 0.692 57.73
lognormal 64 64 0.5  3  0.0497 0.785  5.18 0.783 60.63
lognormal 64 64 0.5  4  0.0275 0.848  6.49 0.846 62.06
lognormal 64 64 0.5  6  0.0108 0.915  9.06 0.913 63.14
lognormal 64 64 0.5  8  0.0048 0.950 11.69 0.948 63.55
lognormal 64 32 0.25 1  0.1724 0.587  2.97 0.589 34.19
lognormal 64 32 0.25 2  0.1810 0.573  2.91 0.576 50.29
lognormal 64 32 0.25 3  0.1424 0.619  3.26 0.622 55.08
lognormal 64 32 0.25 4  0.0969 0.684  3.88 0.688 58.17
lognormal 64 32 0.25 6  0.0484 0.782  5.18 0.786 61.25
lognormal 64 32 0.25 8  0.0269 0.845  6.48 0.849 62.54
capped    64 64 0.5  1  0.1514 0.614  3.05 0.624 50.60
capped    64 64 0.5  2  0.1000 0.687  3.66 0.698 58.55
capped    64 64 0.5  3  0.0512 0.781  4.76 0.794 61.62
capped    64 64 0.5  4  0.0288 0.843  5.77 0.857 63.10
capped    64 64 0.5  6  0.0112 0.913  7.31 0.928 64.27
capped    64 64 0.5  8  0.0030 0.963  7.95 0.979 64.86
capped    64 32 0.25 1  0.1769 0.581  2.84 0.593 34.61
capped    64 32 0.25 2  0.1851 0.568  2.80 0.580 50.88
capped    64 32 0.25 3  0.1447 0.616  3.13 0.629 55.84
capped    64 32 0.25 4  0.0989 0.681  3.68 0.695 58.97
capped    64 32 0.25 6  0.0500 0.778  4.80 0.795 62.17
capped    64 32 0.25 8  0.0278 0.842  5.81 0.859 63.54
"""


def dropping(table):
    workloads, published = zip(*rows(table), strict=True)
    rules = [("--stragglers=drop", f"--max-lag={workload.run_ahead}") for workload in workloads]
    workloads = [replace(workload, rules=words) for workload, words in zip(workloads, rules, strict=True)]
    names = ("drop_fraction", "length", "dropped_length", "length_ratio", "throughput")
    return differences(workloads, published, names, num_seeds=1)


def test_what_dropping_costs_is_as_published():
    assert not dropping(some(DROPPED, "exp 64 32 0.25 2"))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["exp", "lognormal", "capped"])
def test_what_dropping_costs_is_as_published_in_every_row(lengths):
    assert not dropping("\n".join(line for line in DROPPED.splitlines() if line.startswith(lengths)))


# In-flight updates: | mean lag of a rollout, mean lag of a token without them, and with them

IN_FLIGHT = """
exp        64 64 0.5    1  1.00  1.92  1.31
exp        64 64 0.5    2  1.49  2.48  1.48
exp        64 64 0.5    8  1.49  2.48  1.48
exp        64 32 0.25   4  2.52  4.42  2.45
exp        64 16 0.125  8  4.51  8.47  4.45
exp       256 32 0.0625 8  7.99 15.67  8.26
lognormal  64 64 0.5    1  1.00  2.54  1.61
lognormal  64 64 0.5    2  1.50  3.19  1.83
lognormal  64 64 0.5    8  1.50  3.19  1.83
lognormal  64 32 0.25   4  2.51  5.52  3.00
lognormal  64 16 0.125  8  4.53 11.46  5.97
lognormal 256 32 0.0625 8  8.03 20.48 10.66
"""


def token_lags(table):
    workloads, published = zip(*rows(table), strict=True)
    kept = [replace(workload, rules=("--in-flight=keep",)) for workload in workloads]
    pinned = differences(workloads, [printed[:2] for printed in published], ("mean_lag", "token_lag"), num_seeds=1)
    return pinned + differences(kept, [printed[2:] for printed in published], ("token_lag",), num_seeds=1)


def test_in_flight_updates_bring_the_lag_of_tokens_down_as_published():
    assert not token_lags(some(IN_FLIGHT, "exp 64 16 0.125 8"))


@pytest.mark.slow
def test_in_flight_updates_bring_the_lag_of_tokens_down_as_published_in_every_row():
    assert not token_lags(IN_FLIGHT)


# Mean lag = lanes / batch + trainer utilisation, where lanes are always busy: | lane and trainer utilisation, mean lag.
# Constant lengths are the exception: all lanes finish together.

SATURATED = """
exp       64  64 0.5   1.000 0.500  1.5005
exp       64  32 0.25  1.000 0.504  2.5041
exp       64  16 0.125 1.000 0.499  4.5013
exp       64   8 0.06  1.000 0.480  8.4864
exp       64 128 1.0   1.000 0.500  0.9998
exp       48  64 0.7   1.000 0.525  1.2770
lognormal 64  64 0.1   1.000 0.100  1.0993
lognormal 64  64 0.5   1.000 0.502  1.5020
lognormal 64  32 0.25  1.000 0.504  2.4986
lognormal 64  16 0.125 1.000 0.501  4.5002
lognormal 64   8 0.06  1.000 0.484  8.4773
lognormal 64 128 1.0   1.000 0.501  1.0002
lognormal 48  64 0.7   1.000 0.527  1.2762
const     64  64 0.1   1.000 0.100  1.0000
const     64  64 0.5   1.000 0.500  1.0000
const     64  32 0.25  1.000 0.500  2.5002
const     64  16 0.125 1.000 0.500  5.5006
const     64   8 0.06  1.000 0.480 11.5028
const     64 128 1.0   1.000 0.500  0.5000
const     48  64 0.7   1.000 0.525  1.0001
uniform   64  64 0.1   1.000 0.100  1.0994
uniform   64  64 0.5   1.000 0.499  1.4955
uniform   64  32 0.25  1.000 0.502  2.4963
uniform   64  16 0.125 1.000 0.499  4.4984
uniform   64   8 0.06  1.000 0.479  8.4815
uniform   64 128 1.0   1.000 0.500  0.9978
uniform   48  64 0.7   1.000 0.524  1.2691
"""
FAR_AHEAD = 24


def saturated(table, folder):
    workloads, published = [], []
    for line in table.strip().splitlines():
        lengths, lanes, batch_size, train_time, *printed = line.split()
        lengths = uniform_lengths(folder) if lengths == "uniform" else lengths
        workloads.append(Workload(lengths, int(lanes), int(batch_size), float(train_time), FAR_AHEAD))
        published.append(printed)
    return differences(workloads, published, ("lanes", "trainer", "mean_lag"), num_seeds=1)


def uniform_lengths(folder):
    """A file of the 400 quantiles of the uniform distribution from 0 to 2, shuffled; later ones are drawn from it."""
    quantiles = [(number + 0.5) / 200 for number in range(400)]
    Random(0).shuffle(quantiles)
    path = folder / "uniform.txt"
    path.write_text("\n".join(map(str, quantiles)))
    return str(path)


def test_saturated_lanes_make_a_lag_of_their_own(tmp_path):
    lines = [
        line for line in SATURATED.splitlines() if line.split()[:3] in (["exp", "64", "16"], ["const", "64", "16"])
    ]
    assert len(lines) == 2
    assert not saturated("\n".join(lines), tmp_path)


@pytest.mark.slow
def test_saturated_lanes_make_a_lag_of_their_own_in_every_row(tmp_path):
    assert not saturated(SATURATED, tmp_path)


# The batches of the first steps are too short: mean length of step 0, 1, 2 ...

EARLY = {
    (64, 64, 1, 0.5): "0.372 0.794 0.929 0.975 0.996 1.001 1.004 1.006 0.989 0.999 1.001 0.998",
    (64, 32, 1, 0.25): "0.311 0.701 0.862 0.935 0.954 0.991 0.993 0.99 1.012 1.002 0.998 1.002",
    (64, 32, 4, 0.25): "0.22 0.523 0.701 0.817 0.888 0.93 0.96 0.962 1.002 0.996 0.997 0.995",
    (256, 32, 8, 0.05): "0.061 0.171 0.27 0.358 0.434 0.499 0.561 0.61 0.66 0.695 0.725 0.772",
}
EARLY_SEEDS = 30


@pytest.mark.parametrize("sizes", EARLY)
def test_the_first_batches_are_as_short_as_published(sizes):
    """How many seeds the table has is not stated; it is smoother than one, so we take it to have as many as we do."""
    lanes, batch_size, run_ahead, train_time = sizes
    printed = EARLY[sizes].split()
    workload = Workload("exp", lanes, batch_size, train_time, run_ahead, steps=len(printed))
    lengths = [mean_lengths(simulate(resolve(None, workload.words(seed)).config)) for seed in range(EARLY_SEEDS)]
    for step, value in enumerate(printed):
        of_step = [of_seed[step] for of_seed in lengths]
        most = 4 * stdev(of_step) * sqrt(2 / EARLY_SEEDS) + 0.5 * 10 ** -len(value.partition(".")[2])
        assert fmean(of_step) == pytest.approx(float(value), abs=most), f"step {step}"


def mean_lengths(events):
    """Of the rollouts of each batch."""
    tokens = {event["rollout"]: event["tokens"] for event in events if event.kind == "generated"}
    return [fmean(tokens[rollout] for rollout in event["rollouts"]) for event in events if event.kind == "taken"]


def test_the_first_batch_is_as_short_as_order_statistics_say():
    """64 busy lanes finish as a Poisson process; the batch is there at its 64th event, at time t, of mean 1. What the
    lanes have finished by then is t less the age of what they hold. The lane of the 64th event holds nothing; another
    has none of the 63 events before, which are uniform over lanes and time, in its last x with probability
    (1 - x / 64t)^63. So the mean age is 63/64 t (1 - (63/64)^64), and what is left of t is the mean length.
    """
    expected = 1 - 63 / 64 * (1 - (63 / 64) ** 64)
    assert expected == pytest.approx(0.375, abs=0.0005)
    events = [
        simulate(resolve(None, Workload("exp", 64, 64, 0.5, 1, steps=1).words(seed)).config) for seed in range(60)
    ]
    first = [mean_lengths(of_seed)[0] for of_seed in events]
    assert fmean(first) == pytest.approx(expected, abs=4 * stdev(first) / sqrt(len(first)))


# Dropped rollouts give their slots back

DROPPING_AT_1 = Workload("exp", 64, 64, 0.5, 1, ("--stragglers=drop", "--max-lag=1"), steps=150)
DROPPING_AT_4 = Workload("lognormal", 64, 64, 0.5, 4, ("--stragglers=drop", "--max-lag=4"), steps=600)


def rates(workload, seed=0):
    """Samples per time over the first 50 steps, and over the last 50."""
    events = simulate(resolve(None, workload.words(seed)).config)
    trained_s = [0.0, *(event.at_s for event in events if event.kind == "trained")]
    num = 50 * workload.batch_size
    return num / trained_s[50], num / (trained_s[-1] - trained_s[-51])


def keep_the_slots(monkeypatch):
    """The literal rule, in which what was dropped still counts as started."""
    monkeypatch.setattr(Ledger, "groups_released", property(lambda ledger: 0, lambda ledger, num: None), raising=False)


def test_with_slots_given_back_throughput_does_not_decay():
    first, last = rates(DROPPING_AT_1)
    assert last == pytest.approx(first, rel=0.1)
    assert last == pytest.approx(49.02, rel=0.1)


def test_without_it_would(monkeypatch):
    keep_the_slots(monkeypatch)
    first, last = rates(DROPPING_AT_1)
    assert (first, last) == (pytest.approx(21.7, rel=0.1), pytest.approx(12.9, rel=0.1))


@pytest.mark.slow
def test_with_slots_given_back_throughput_does_not_decay_over_600_steps():
    first, last = rates(DROPPING_AT_4)
    assert last == pytest.approx(first, rel=0.1)
    assert last == pytest.approx(62.06, rel=0.05)


@pytest.mark.slow
def test_without_it_would_by_three_quarters_over_600_steps(monkeypatch):
    keep_the_slots(monkeypatch)
    first, last = rates(DROPPING_AT_4)
    assert first == pytest.approx(61.5, rel=0.1)
    assert last == pytest.approx(15.8, rel=0.35)
