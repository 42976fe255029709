"""The pace of a run comes out of its work as it went in; and what a run can't tell is refused."""

import json

import pytest

from headway.plan.gpus import find_gpu
from headway.planning.pace import efficiency, measured, pace
from headway.reports.record import WORK
from headway.types import UserError
from tests.planning import recorded as known
from tests.planning.recorded import recorded


def test_a_known_pace_is_recovered(tmp_path):
    found = pace([measured(recorded(tmp_path / "run"))])
    assert found.pass_s == pytest.approx(known.PASS_S, rel=1e-6)
    assert found.row_s == pytest.approx(known.ROW_S, rel=1e-6)
    assert found.prefill_s == pytest.approx(known.PREFILL_S, rel=1e-6)
    assert found.cached_s == pytest.approx(known.CACHED_S, rel=1e-6)
    assert found.rate == pytest.approx(known.RATE, rel=1e-6)
    assert found.update_s == pytest.approx(known.UPDATE_S)
    assert found.rest_s == pytest.approx(known.REST_S, rel=1e-6)
    assert found.assumed == ("engine", "trainer")
    assert (found.engine_slowdown, found.trainer_slowdown) == (2.0, 2.0)  # nothing was ever done beside the other


def test_where_contexts_vary_a_cached_token_has_a_cost_of_its_own(tmp_path):
    found = pace([measured(recorded(tmp_path / "run", cached_s=30e-6, context=(20, 900)))])
    assert found.cached_s == pytest.approx(30e-6, rel=1e-6)
    assert found.pass_s == pytest.approx(known.PASS_S, rel=1e-6)


def test_how_much_slower_work_is_beside_other_work(tmp_path):
    found = pace([measured(recorded(tmp_path / "run", slowdown=1.6))])
    assert found.engine_slowdown == pytest.approx(1.6, rel=1e-6)
    assert found.trainer_slowdown == pytest.approx(1.6, rel=1e-6)
    assert found.assumed == ()
    assert found.rate == pytest.approx(known.RATE, rel=1e-6)


def test_an_adapters_passes_have_one_product_less(tmp_path):
    found = pace([measured(recorded(tmp_path / "run", "--adapter.kind", "lora", "--adapter.rank", "8"))])
    assert found.rate == pytest.approx(known.RATE, rel=1e-6)


def test_several_runs_are_joined(tmp_path):
    runs = [measured(recorded(tmp_path / name)) for name in ("one", "two")]
    assert pace(runs).pass_s == pytest.approx(known.PASS_S, rel=1e-6)
    assert pace(runs).source == f"{tmp_path / 'one'}, {tmp_path / 'two'}"


def test_runs_of_different_adapters_are_refused(tmp_path):
    one = measured(recorded(tmp_path / "one"))
    other = measured(recorded(tmp_path / "other", "--adapter.kind", "lora", "--adapter.rank", "8"))
    with pytest.raises(UserError, match=r"has adapter\.kind none, and .*other has lora"):
        pace([one, other])


def test_a_run_without_work_is_refused(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / WORK).unlink()
    with pytest.raises(UserError, match=r"holds no work\.jsonl"):
        measured(folder)


@pytest.mark.parametrize(
    "line",
    ['{"version": 4}', '{"version": 4, "work": [{"num": 1}]}', '{"version": 4, "work": 3, "device": "cpu"}', "[]"],
)
def test_a_line_that_says_too_little_is_left_out(tmp_path, line):
    folder = recorded(tmp_path / "run")
    with (folder / WORK).open("a") as file:
        file.write(line + "\n")
    assert pace([measured(folder)]).pass_s == pytest.approx(known.PASS_S, rel=1e-6)


def test_a_run_without_a_configuration_is_refused(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / "config.toml").unlink()
    with pytest.raises(UserError, match=r"holds no config\.toml that can be read"):
        measured(folder)


def test_a_run_on_cores_that_are_not_shared_out_is_refused(tmp_path):
    with pytest.raises(UserError, match="what each takes alone can't be told"):
        pace([measured(recorded(tmp_path / "run", "--run.share-cores=false"))])


def test_too_short_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="has 1 train steps beside the first, and it takes 2"):
        measured(recorded(tmp_path / "run", steps=2))


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    folder = recorded(tmp_path / "run")
    with (folder / WORK).open("a") as file:
        file.write(json.dumps({"version": 13, "work": []})[:-5])
    assert pace([measured(folder)]).pass_s == pytest.approx(known.PASS_S, rel=1e-6)


def test_efficiencies_of_a_gpu_are_what_it_reached(tmp_path):
    """Of an H100: 46,080 bytes in 20 ns are 2.304 TB/s of 3.35; 200 TFLOP/s of 989; and what of a pass is not reading
    half a gigabyte of weights is overhead.
    """
    h100 = find_gpu("h100")
    folder = recorded(tmp_path / "run", device="NVIDIA H100 80GB HBM3", cached_s=20e-9, context=(20, 9000))
    run = measured(folder)
    reached, passes = efficiency([run], h100), [row for row in run.work if row["kind"] == "pass"]
    assert reached["bandwidth"] == pytest.approx(46_080 / 20e-9 / h100.bandwidth, rel=1e-3)
    assert reached["training"] == pytest.approx(known.RATE / h100.bf16_flops)
    assert reached["prefill"] == pytest.approx(2 * 134_515_008 / known.PREFILL_S / h100.bf16_flops, rel=0.01)
    reading_s = 4 * known.SHAPE.num_touched_params(1) / (46_080 / 20e-9)
    rows = sum(row["rows"] for row in passes) / sum(row["num"] for row in passes)
    assert reached["step_overhead_s"] == pytest.approx(known.PASS_S + known.ROW_S * rows - reading_s, rel=1e-3)


def test_where_contexts_are_alike_bandwidth_is_not_guessed_from_them(tmp_path):
    """20 ms of a pass and 1 ms for each of its rollouts, less half a gigabyte at the usual share of the bandwidth."""
    h100 = find_gpu("h100")
    folder = recorded(tmp_path / "run", device="NVIDIA H100 80GB HBM3")
    run = measured(folder)
    reached = efficiency([run], h100)
    assert "bandwidth" not in reached
    passes = [row for row in run.work if row["kind"] == "pass"]
    rows = sum(row["rows"] for row in passes) / sum(row["num"] for row in passes)
    reading_s = 4 * known.SHAPE.num_touched_params(1) / (0.8 * h100.bandwidth)
    assert reached["step_overhead_s"] == pytest.approx(known.PASS_S + known.ROW_S * rows - reading_s, rel=1e-3)


def test_more_than_a_gpu_can_is_refused(tmp_path):
    folder = recorded(tmp_path / "run", device="NVIDIA L4", cached_s=1e-12, context=(20, 9000))
    with pytest.raises(UserError, match=r"the GPU reached .* of what a L4 can"):
        efficiency([measured(folder)], find_gpu("l4"))


@pytest.mark.parametrize(
    ("device", "said"),
    [("cpu", "leave out --gpu to plan a run on this machine"), ("NVIDIA L40S", "plan for what it ran on")],
)
def test_another_device_says_nothing_of_a_gpu(tmp_path, device, said):
    folder = recorded(tmp_path / "run", device=device)
    with pytest.raises(UserError, match=f"ran on {device}, which says nothing of a H100 SXM: {said}"):
        efficiency([measured(folder)], find_gpu("h100"))
