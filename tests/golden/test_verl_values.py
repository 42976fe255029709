"""Headway beside verl: every recorded case agrees, differs as stated, or has no counterpart.

`verl.json` was written by verl's own functions, in an environment of its own: see `benchmarks/against_verl.py`.
"""

from __future__ import annotations

import pytest

from tests.golden.verl import Case, cases, recorded
from tests.golden.verl_headway import EVALUATE, HEADWAY, Conventions, headway
from tests.golden.verl_table import FIGURES, PAGE, page
from tests.golden.verl_verdicts import REASONS, SAME_KEPT, VERDICTS, Verdict, disagreements, verdicts_of


def name_of(case: Case) -> str:
    return f"{case['kind']} {case['name']} {case.get('inputs', '')} {case['settings']}"


def judged() -> list[tuple[Case, Verdict]]:
    return [(case, verdict) for case in cases() for verdict in verdicts_of(case)]


AGREES = [case for case, verdict in judged() if not verdict.differs and not verdict.only_there]
DIFFERS = [(case, verdict) for case, verdict in judged() if verdict.differs]
ONLY_THERE = [case for case, verdict in judged() if verdict.only_there]


def test_every_case_has_one_verdict_and_every_verdict_a_case():
    assert [name_of(case) for case in cases() if len(verdicts_of(case)) != 1] == []
    assert [verdict for verdict in VERDICTS if not any(verdict.covers(case) for case in cases())] == []
    assert len(AGREES) + len(DIFFERS) + len(ONLY_THERE) == len(cases())


def test_every_reason_is_given_somewhere():
    assert {reason for _, verdict in DIFFERS for reason in verdict.differs} == set(REASONS)


@pytest.mark.parametrize("case", AGREES, ids=name_of)
def test_values_and_gradients_agree(case):
    assert disagreements(case, headway(case), recorded(case)) == []


@pytest.mark.parametrize(("case", "verdict"), DIFFERS, ids=lambda item: name_of(item) if isinstance(item, dict) else "")
def test_values_differ_by_what_is_stated(case, verdict):
    theirs = recorded(case)
    assert disagreements(case, headway(case), theirs) != []
    assert disagreements(case, headway(case, verdict.conventions), theirs) == []


@pytest.mark.parametrize(("case", "verdict"), DIFFERS, ids=lambda item: name_of(item) if isinstance(item, dict) else "")
def test_no_reason_is_superfluous(case, verdict):
    for reason in verdict.differs:
        others = Verdict(kind="", differs=tuple(other for other in verdict.differs if other != reason))
        assert disagreements(case, headway(case, others.conventions), recorded(case)) != []


def test_where_bounds_of_the_inverse_keep_the_same():
    noted = [case for case in AGREES if verdicts_of(case)[0].note == SAME_KEPT]
    assert noted
    for case in noted:
        assert disagreements(case, headway(case, Conventions(inverse_bounds=True)), recorded(case)) == []


def test_the_page_is_the_tables():
    assert page() == PAGE.read_text(encoding="utf-8"), "python -m tests.golden.verl_table"


@pytest.mark.parametrize("case", AGREES, ids=name_of)
def test_figures_of_what_agrees_are_the_same(case):
    figures = FIGURES[case["kind"]]
    assert figures(headway(case)) == figures(recorded(case))


def test_headway_conventions_are_the_default():
    assert Verdict(kind="").conventions == HEADWAY


@pytest.mark.parametrize("case", ONLY_THERE, ids=name_of)
def test_what_has_no_counterpart_is_not_evaluated(case):
    own = EVALUATE.get((case["kind"], case["name"])) or EVALUATE.get((case["kind"], "*"))
    if case["name"] == "whiten":
        assert disagreements(case, headway(case), recorded(case)) != []
    elif own is not None:
        with pytest.raises(KeyError):
            headway(case)
