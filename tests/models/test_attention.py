"""Packed and cached attention against the model's own forward pass, one sequence at a time."""

from __future__ import annotations

import random

import pytest
import torch

from headway.models.attention import CachedAttention, KeyValueCache, PackedAttention, Segment
from headway.models.policy import Policy
from headway.types import UserError
from tests import tiny
from tests.tiny import make_policy, packed_hidden, random_ids

ARCHITECTURES = ("llama", "qwen3", "qwen2", "gpt2", "deepseek_v3")
CPU = torch.device("cpu")


def own_hidden(policy: Policy, ids_T: torch.Tensor) -> torch.Tensor:
    return tiny.plain(policy).base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def equal_rows(segments: list[Segment], num_rows: int) -> torch.Tensor:
    """The output of attention when all keys are alike: the mean of the values each row sees. Values are row numbers."""
    ones_HTD = torch.ones(1, num_rows, 1)
    return PackedAttention(segments, CPU).attend(
        0, ones_HTD, ones_HTD, torch.arange(float(num_rows)).view(1, -1, 1), 1.0
    )


# ---- worked by hand


def test_each_row_sees_its_own_past():
    assert equal_rows([Segment(0, 3), Segment(3, 2)], 5).flatten().tolist() == [0, 0.5, 1, 3, 3.5]


def test_a_segment_sees_its_whole_prefix_and_no_sibling():
    prefix, first, second = Segment(0, 2), Segment(2, 2, 0, 2), Segment(4, 1, 0, 2)
    seen = equal_rows([prefix, first, second], 5).flatten().tolist()
    assert seen == pytest.approx([0, 0.5, (0 + 1 + 2) / 3, (0 + 1 + 2 + 3) / 4, (0 + 1 + 4) / 3])


def test_a_prefix_may_stand_behind_what_shares_it():
    seen = equal_rows([Segment(0, 1, 1, 2), Segment(1, 2)], 3).flatten().tolist()
    assert seen == pytest.approx([(1 + 2 + 0) / 3, 1, 1.5])


def test_query_heads_share_their_key_head_in_order():
    values_GTD = torch.tensor([[[1.0]], [[2.0]]])
    out = PackedAttention([Segment(0, 1)], CPU).attend(0, torch.ones(4, 1, 1), torch.ones(2, 1, 1), values_GTD, 1.0)
    assert out.flatten().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 2), Segment(3, 2)],
        [Segment(1, 4)],
        [Segment(0, 3), Segment(2, 2)],
    ],
    ids=["a gap", "a late beginning", "an overlap"],
)
def test_segments_that_leave_rows_uncovered_are_our_mistake(segments):
    with pytest.raises(AssertionError, match="uncovered"):
        PackedAttention(segments, CPU)


def test_rows_behind_the_last_segment_are_our_mistake(policy):
    plan = PackedAttention([Segment(0, 4)], CPU)
    with pytest.raises(AssertionError, match="cover 4 of the forward's 6 rows"):
        policy.hidden(random_ids(6), torch.arange(6), plan)


# ---- packed rows are the model's own


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_equal_each_sequence_alone(architecture):
    policy = make_policy(architecture)
    sequences = [random_ids(length, seed=length) for length in (5, 1, 12, 7, 1, 16, 2)]
    with torch.no_grad():
        for ids_T, hidden_TD in zip(sequences, packed_hidden(policy, sequences), strict=True):
            assert_close(hidden_TD, own_hidden(policy, ids_T))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_alone_is_the_row_in_company(architecture):
    """B11: with learned positions as with rotary ones, a row does not know where in the pass it stands."""
    policy, ids_T = make_policy(architecture), random_ids(9)
    with torch.no_grad():
        (alone,) = packed_hidden(policy, [ids_T])
        in_company = packed_hidden(policy, [random_ids(3, 1), random_ids(11, 2), ids_T, random_ids(8, 3)])[2]
    assert_close(in_company, alone)


def test_the_order_of_packing_leaves_no_trace(policy):
    sequences = [random_ids(length, seed=length) for length in (4, 9, 1, 6, 3)]
    with torch.no_grad():
        expected = packed_hidden(policy, sequences)
        for seed in range(4):
            order = random.Random(seed).sample(range(5), 5)
            for number, hidden_TD in zip(order, packed_hidden(policy, [sequences[i] for i in order]), strict=True):
                assert_close(hidden_TD, expected[number])


def test_the_order_of_segments_leaves_no_trace(policy):
    ids_T, positions_T = random_ids(9), torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])
    segments = [Segment(0, 4), Segment(4, 2), Segment(6, 3)]
    with torch.no_grad():
        forwards = policy.hidden(ids_T, positions_T, PackedAttention(segments, CPU))
        backwards = policy.hidden(ids_T, positions_T, PackedAttention(segments[::-1], CPU))
    assert_close(backwards, forwards)


# ---- a shared prefix is as many copies


PREFIX, ANSWERS = 6, (1, 3, 5, 4)
"""Answers of 4 and 5 rows share a block, so one of them is padded."""


def shared(policy: Policy, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states of prefix and answers, where the prefix is computed once."""
    lengths = [len(part) for part in ids]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    answers = [Segment(start, length, 0, PREFIX) for start, length in zip(starts[1:], lengths[1:], strict=True)]
    positions = [torch.arange(PREFIX), *(torch.arange(length) + PREFIX for length in lengths[1:])]
    plan = PackedAttention([Segment(0, PREFIX), *answers], CPU)
    return list(policy.hidden(torch.cat(ids), torch.cat(positions), plan).split(lengths))


def separate(policy: Policy, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by the model's own passes, each over its own copy of the prefix."""
    own_ids = [ids[0], *(torch.cat([ids[0], answer]) for answer in ids[1:])]
    passes = [
        policy.model.base_model(
            input_ids=own[None], use_cache=False, attention_plan=PackedAttention([Segment(0, len(own))], CPU)
        )
        for own in own_ids
    ]
    hidden = [output.last_hidden_state[0] for output in passes]
    return [hidden[0], *(answer[PREFIX:] for answer in hidden[1:])]


def gradients(policy: Policy, hidden: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a loss that weighs every number of every row differently."""
    rows_TD = torch.cat(hidden)
    direction_TD = torch.randn(rows_TD.shape, generator=torch.Generator().manual_seed(0))
    policy.model.zero_grad()
    (rows_TD * direction_TD).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_shared_prefix_equals_separate_copies(architecture):
    policy = make_policy(architecture)
    ids = [random_ids(length, seed=length) for length in (PREFIX, *ANSWERS)]
    with torch.no_grad():
        for once, copied in zip(shared(policy, ids), separate(policy, ids), strict=True):
            assert_close(once, copied)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_through_a_shared_prefix_equal_those_of_separate_copies(architecture):
    policy = make_policy(architecture)
    ids = [random_ids(length, seed=length) for length in (PREFIX, *ANSWERS)]
    once, copied = gradients(policy, shared(policy, ids)), gradients(policy, separate(policy, ids))
    assert once.keys() == copied.keys()
    for name in once:
        scale = copied[name].abs().max()
        assert (once[name] - copied[name]).abs().max() <= 1e-5 * scale, name


# ---- padding


def test_padding_has_no_gradient_and_no_nan():
    """Rows of one segment, and of the prefix it sees, are all that its output depends on; the rest is exactly 0."""
    prefix, short, long = Segment(0, 3), Segment(3, 4, 0, 3), Segment(7, 7)
    query_HTD, key_GTD, value_GTD = (torch.randn(heads, 14, 4, requires_grad=True) for heads in (4, 2, 2))
    out = PackedAttention([prefix, short, long], CPU).attend(0, query_HTD, key_GTD, value_GTD, 0.5)
    out[3:7].square().sum().backward()
    for tensor, touched in ((query_HTD, range(3, 7)), (key_GTD, range(7)), (value_GTD, range(7))):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        untouched = [row for row in range(14) if row not in touched]
        assert not tensor.grad[:, untouched].any()
        assert tensor.grad[:, list(touched)].any()


def test_gradients_stay_finite_with_extreme_scores():
    query_HTD, key_GTD, value_GTD = (torch.randn(heads, 9, 4) * 100 for heads in (4, 2, 2))
    tensors = [tensor.requires_grad_() for tensor in (query_HTD, key_GTD, value_GTD)]
    PackedAttention([Segment(0, 1), Segment(1, 5), Segment(6, 3, 1, 5)], CPU).attend(0, *tensors, 0.5).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors)


# ---- the cache


def prefill(policy: Policy, prompts: list[torch.Tensor], lanes: int, room: int) -> KeyValueCache:
    cache = KeyValueCache(lanes)
    for lane, ids_T in enumerate(prompts):
        plan = PackedAttention([Segment(0, len(ids_T))], CPU, keep=True)
        policy.hidden(ids_T, torch.arange(len(ids_T)), plan)
        assert plan.kept is not None
        cache.reserve(room, plan.kept)
        cache.write(lane, plan.kept)
    return cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_cached_decoding_equals_the_whole_sequence(architecture):
    policy = make_policy(architecture)
    whole = [random_ids(length, seed=length) for length in (15, 9, 20)]
    lengths = [7, 1, 12]
    cache = prefill(policy, [ids_T[:length] for ids_T, length in zip(whole, lengths, strict=True)], lanes=3, room=20)
    for step in range(8):
        positions_N = torch.tensor(lengths) + step
        ids_N = torch.stack([ids_T[position] for ids_T, position in zip(whole, positions_N, strict=True)])
        hidden_ND = policy.hidden(ids_N, positions_N, CachedAttention(cache, positions_N))
        for row, ids_T in enumerate(whole):
            assert_close(hidden_ND[row], own_hidden(policy, ids_T[: positions_N[row] + 1])[-1])


def kept(num_tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random_numbers = torch.Generator().manual_seed(seed)
    return [(torch.randn(2, num_tokens, 4, generator=random_numbers), torch.randn(2, num_tokens, 3)) for _ in range(2)]


def assert_lane_holds(cache: KeyValueCache, lane: int, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for (keys, values), (key, value) in zip(cache.layers, expected, strict=True):
        assert torch.equal(keys[lane, :, : key.shape[1]], key)
        assert torch.equal(values[lane, :, : value.shape[1]], value)


def test_growing_keeps_what_is_cached():
    first, second = kept(5, 1), kept(3, 2)
    cache = KeyValueCache(3)
    cache.reserve(10, first)
    cache.write(0, first)
    cache.write(1, second)
    before = cache.capacity
    cache.reserve(before, first)
    assert cache.capacity == before
    cache.reserve(before + 1, second)
    assert cache.capacity > before
    assert_lane_holds(cache, 0, first)
    assert_lane_holds(cache, 1, second)


def test_a_moved_lane_keeps_what_is_cached():
    first, last = kept(4, 1), kept(6, 2)
    cache = KeyValueCache(4)
    cache.reserve(8, first)
    cache.write(1, first)
    cache.write(3, last)
    cache.move(3, 0, 6)
    assert_lane_holds(cache, 0, last)
    assert_lane_holds(cache, 1, first)


@torch.no_grad()
def test_what_an_earlier_occupant_left_is_not_seen(policy):
    long, short = random_ids(20, 1), random_ids(4, 2)
    cache = prefill(policy, [long], lanes=1, room=24)
    plan = PackedAttention([Segment(0, 3)], CPU, keep=True)
    policy.hidden(short[:3], torch.arange(3), plan)
    assert plan.kept is not None
    cache.write(0, plan.kept)
    hidden_ND = policy.hidden(short[3:], torch.tensor([3]), CachedAttention(cache, torch.tensor([3])))
    assert_close(hidden_ND[0], own_hidden(policy, short)[-1])


# ---- what is not implemented is refused by name


def test_a_sequence_longer_than_the_sliding_window_is_refused():
    policy = make_policy("mistral")
    packed_hidden(policy, [random_ids(16), random_ids(16)])
    with pytest.raises(UserError, match=r"MistralAttention attends within a sliding window of 16 tokens .* has 17"):
        packed_hidden(policy, [random_ids(3), random_ids(17)])


def test_decoding_beyond_the_sliding_window_is_refused():
    policy = make_policy("mistral")
    with torch.no_grad():
        cache = prefill(policy, [random_ids(15)], lanes=1, room=20)
        for position, refused in ((15, False), (16, True)):
            position_N = torch.tensor([position])
            if refused:
                with pytest.raises(UserError, match="sliding window of 16"):
                    policy.hidden(random_ids(1), position_N, CachedAttention(cache, position_N))
            else:
                policy.hidden(random_ids(1), position_N, CachedAttention(cache, position_N))


def test_soft_capped_attention_is_refused():
    with pytest.raises(UserError, match="Gemma2Attention uses softcap in its attention"):
        make_policy("gemma2")


def test_attention_sinks_are_refused():
    with pytest.raises(UserError, match="GptOssAttention uses s_aux in its attention"):
        make_policy("gpt_oss")
