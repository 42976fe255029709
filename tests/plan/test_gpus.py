"""Facts of accelerators, and figures that follow from them alone."""

import pytest

from headway.plan.gpus import find_gpu, gpus
from headway.types import UserError

RIDGES = {
    "a100-40-sxm": 201,
    "a100-80-sxm": 153,
    "a100-80-pcie": 161,
    "h100-sxm": 295,
    "h100-pcie": 378,
    "h200-sxm": 206,
    "b200": 281,
    "gb200": 312,
    "mi300x": 247,
    "l40s": 419,
    "l4": 403,
    "rtx-4090": 164,
    "rtx-5090": 117,
    "t4": 203,
}


def test_operations_per_byte_of_every_card():
    assert {name: round(gpu.ridge) for name, gpu in gpus().items()} == RIDGES


def test_every_card_says_where_its_figures_are_from_and_which_are_in_doubt():
    assert all(gpu.source for gpu in gpus().values())
    assert {name for name, gpu in gpus().items() if gpu.doubt} == {"a100-40-sxm", "l4", "rtx-4090", "rtx-5090", "t4"}


def test_a_link_is_counted_one_way():
    """900 GB/s of NVLink 4 is what goes and what comes."""
    assert find_gpu("h100").link == 450e9


@pytest.mark.parametrize(
    ("name", "found"), [("h100", "h100-sxm"), ("H100_PCIe", "h100-pcie"), ("A100", "a100-80-sxm"), ("4090", "rtx-4090")]
)
def test_a_card_is_found_by_the_names_people_use(name, found):
    assert find_gpu(name).name == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "unknown GPU 'h10'; did you mean h100-sxm"),
        ("tpu", "unknown GPU 'tpu'; known are a100-40-sxm, a100-80-sxm"),
    ],
)
def test_an_unknown_card_names_the_nearest(name, message):
    with pytest.raises(UserError, match=message):
        find_gpu(name)
