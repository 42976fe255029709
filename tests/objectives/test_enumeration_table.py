"""The table of bias and variance in `docs/objectives.md`: it is what the code gives now, and says what the page says.

Not covered: other ways to draw mu (here all its logits differ from pi's by independent normal numbers), and the
limit of large batches behind the self-normalised rows.
"""

from __future__ import annotations

import pytest

from tests.objectives import bias_table

REFRESH = (
    "the table of docs/objectives.md is not what the code gives; refresh it: python -m tests.objectives.bias_table"
)


@pytest.fixture(scope="module")
def computed() -> dict[str, list[list[float]]]:
    return rows(bias_table.table())


def rows(table: str) -> dict[str, list[list[float]]]:
    """Row -> column -> [bias, variance] (or the one number there is)."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    return {name: [[float(part) for part in cell.split("/")] for cell in cells] for name, *cells in lines[2:]}


def test_the_page_shows_what_the_code_gives(computed):
    """To one unit of the last digit printed: 0.001 of a bias, 1 of a variance."""
    printed = rows(bias_table.on_page(bias_table.PAGE.read_text()))
    assert list(printed) == list(computed), REFRESH
    for name, cells in computed.items():
        for found, shown in zip(cells, printed[name], strict=True):
            for place, (now, then) in enumerate(zip(found, shown, strict=True)):
                assert now == pytest.approx(then, abs=1.001 * (0.001, 1)[place]), f"{name}: {REFRESH}"


def test_writing_the_table_twice_changes_nothing(tmp_path, monkeypatch):
    page = tmp_path / "objectives.md"
    page.write_text(f"before\n{bias_table.BEGIN}\nold\n{bias_table.END}\nafter\n")
    monkeypatch.setattr(bias_table, "PAGE", page)
    monkeypatch.setattr(bias_table, "table", lambda: "| new |")
    bias_table.write()
    first = page.read_text()
    assert first == f"before\n{bias_table.BEGIN}\n| new |\n{bias_table.END}\nafter\n"
    bias_table.write()
    assert page.read_text() == first


def test_what_the_page_says_in_words_is_in_its_numbers(computed):
    bias = {name: [cell[0] for cell in cells] for name, cells in computed.items()}
    variance = {name: [cell[-1] for cell in cells] for name, cells in computed.items()}
    for column in range(3):
        assert 0.7 < bias["`is`"][column] / bias["none"][column] < 0.9, "token weights: about a fifth of the bias"
    assert bias["`is`"][3] > 0.95 * bias["none"][3], "and none at the largest mismatch"
    assert abs(bias["`tis`"][3] - bias["`is`"][3]) < 0.1
    assert variance["`tis`"][3] < variance["`is`"][3] / 2
    assert bias["`mis`"] == pytest.approx(bias["`tis`"], abs=0.1)
    assert bias["`icepop`"] == pytest.approx(bias["`tis`"], abs=0.15)
    assert bias["`sequence_is`"] == [0, 0, 0, 0]
    assert variance["`sequence_is`"][2] < variance["none"][2] < variance["`sequence_is`"][3] / 5
    assert bias["`sequence_tis`"][:2] == [0, 0]
    assert bias["`sequence_mis`"][2] > 4 * bias["`sequence_tis`"][2] > 0
    assert bias["`sequence_tis`, self-normalised"] == pytest.approx(bias["`sequence_tis`"], abs=0.02)
    assert variance["`sequence_tis`, self-normalised"][3] > 3 * variance["`sequence_tis`"][3]
    assert min(bias["`geometric_rejection`"]) > 0.9
    assert bias["`off_policy_mask`"][0] > 10 * bias["none"][0]
    assert bias["`k3_rejection`"][0] == pytest.approx(bias["none"][0], abs=0.001)
