"""Packed attention against the model's own forward pass, one sequence at a time, and the order in which it sums."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from headway.models import attention
from headway.models.attention import BLOCK, PackedAttention, Segment
from headway.models.parity import bitwise
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


def equal_rows(segments: list[Segment], num_rows: int, fixed_order: bool) -> torch.Tensor:
    """The output of attention when all keys are alike: the mean of the values each row sees. Values are row numbers."""
    ones_HTD = torch.ones(1, num_rows, 1)
    plan = PackedAttention(segments, CPU, fixed_order=fixed_order)
    return plan.attend(0, ones_HTD, ones_HTD, torch.arange(float(num_rows)).view(1, -1, 1), 1.0)


in_every_order = pytest.mark.parametrize("fixed_order", [False, True], ids=["any order", "fixed order"])


# ---- worked by hand


@in_every_order
def test_each_row_sees_its_own_past(fixed_order):
    assert equal_rows([Segment(0, 3), Segment(3, 2)], 5, fixed_order).flatten().tolist() == [0, 0.5, 1, 3, 3.5]


@in_every_order
def test_a_segment_sees_its_whole_prefix_and_no_sibling(fixed_order):
    prefix, first, second = Segment(0, 2), Segment(2, 2, 0, 2), Segment(4, 1, 0, 2)
    seen = equal_rows([prefix, first, second], 5, fixed_order).flatten().tolist()
    assert seen == pytest.approx([0, 0.5, (0 + 1 + 2) / 3, (0 + 1 + 2 + 3) / 4, (0 + 1 + 4) / 3])


@in_every_order
def test_a_prefix_may_stand_behind_what_shares_it(fixed_order):
    seen = equal_rows([Segment(0, 1, 1, 2), Segment(1, 2)], 3, fixed_order).flatten().tolist()
    assert seen == pytest.approx([(1 + 2 + 0) / 3, 1, 1.5])


@in_every_order
def test_query_heads_share_their_key_head_in_order(fixed_order):
    values_GTD = torch.tensor([[[1.0]], [[2.0]]])
    plan = PackedAttention([Segment(0, 1)], CPU, fixed_order=fixed_order)
    out = plan.attend(0, torch.ones(4, 1, 1), torch.ones(2, 1, 1), values_GTD, 1.0)
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
    with pytest.raises(AssertionError, match="the plan covers 4 rows and the forward has 6"):
        policy.hidden(random_ids(6), torch.arange(6), plan)


def test_segments_behind_the_last_row_are_our_mistake(policy):
    with pytest.raises(AssertionError, match="the plan covers 4 rows and the forward has 3"):
        policy.hidden(random_ids(3), torch.arange(3), PackedAttention([Segment(0, 4)], CPU))


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


@in_every_order
def test_padding_has_no_gradient_and_no_nan(fixed_order):
    """Rows of one segment, and of the prefix it sees, are all that its output depends on; the rest is exactly 0."""
    prefix, short, long = Segment(0, 3), Segment(3, 4, 0, 3), Segment(7, 7)
    query_HTD, key_GTD, value_GTD = (torch.randn(heads, 14, 4, requires_grad=True) for heads in (4, 2, 2))
    plan = PackedAttention([prefix, short, long], CPU, fixed_order=fixed_order)
    out = plan.attend(0, query_HTD, key_GTD, value_GTD, 0.5)
    out[3:7].square().sum().backward()
    for tensor, touched in ((query_HTD, range(3, 7)), (key_GTD, range(7)), (value_GTD, range(7))):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        untouched = [row for row in range(14) if row not in touched]
        assert not tensor.grad[:, untouched].any()
        assert tensor.grad[:, list(touched)].any()


@in_every_order
def test_gradients_stay_finite_with_extreme_scores(fixed_order):
    query_HTD, key_GTD, value_GTD = ((torch.randn(heads, 9, 4) * 100).requires_grad_() for heads in (4, 2, 2))
    plan = PackedAttention([Segment(0, 1), Segment(1, 5), Segment(6, 3, 1, 5)], CPU, fixed_order=fixed_order)
    plan.attend(0, query_HTD, key_GTD, value_GTD, 0.5).sum().backward()
    for tensor in (query_HTD, key_GTD, value_GTD):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


# ---- a fixed order


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_rows(num_rows: int, key_heads: int, ratio: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values."""
    numbers = torch.Generator().manual_seed(seed)
    return [
        torch.randn(heads, num_rows, size, generator=numbers) for heads in (key_heads * ratio, key_heads, key_heads)
    ]


def attend(tensors: Sequence[torch.Tensor], segments: Sequence[Segment], *, fixed_order: bool) -> torch.Tensor:
    query_HTD, key_GTD, value_GTD = tensors
    return PackedAttention(segments, CPU, fixed_order=fixed_order).attend(0, query_HTD, key_GTD, value_GTD, 0.3)


def fixed(tensors: Sequence[torch.Tensor], segments: Sequence[Segment]) -> torch.Tensor:
    return attend(tensors, segments, fixed_order=True)


def test_what_is_summed_in_which_order():
    """Of 70 prompt tokens and 3 own ones the last row sums blocks of 32, 32, 6, then its own, then the two."""
    query_HTD, key_GTD, value_GTD = random_rows(73, 1, 1, 16)
    ours = fixed([query_HTD, key_GTD, value_GTD], [Segment(0, 70), Segment(70, 3, 0, 70)])[72, 0]
    scores_K = key_GTD[0] @ (query_HTD[0, 72] * 0.3)
    weights_K = (scores_K - scores_K.max()).exp()

    def block(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return weights_K[first:last] @ value_GTD[0, first:last], weights_K[first:last].sum()

    parts = [block(0, 32), block(32, 64), block(64, 70), block(70, 73)]
    (a, i), (b, j), (c, k), (own, total) = parts
    torch.testing.assert_close(ours, (((a + b) + c) + own) / (((i + j) + k) + total), atol=1e-6, rtol=1e-6)


SEGMENTS = [
    [Segment(0, 1)],
    [Segment(0, 33), Segment(33, 4)],
    [Segment(0, 40), Segment(40, 9, 0, 40), Segment(49, 64, 0, 40), Segment(113, 1, 0, 40)],
    [Segment(0, 150), Segment(150, 7, 0, 150), Segment(157, 200, 0, 150), Segment(357, 32)],
]


@pytest.mark.parametrize("segments", SEGMENTS, ids=["one row", "two", "a group", "long ones"])
@pytest.mark.parametrize(("key_heads", "ratio", "size"), [(2, 2, 8), (3, 3, 64), (1, 1, 12), (1, 5, 16)])
def test_a_fixed_order_changes_nothing_but_the_order(segments, key_heads, ratio, size):
    """Nor the gradients, which are those of the same function."""
    num_rows = sum(segment.length for segment in segments)
    tensors = [tensor.requires_grad_() for tensor in random_rows(num_rows, key_heads, ratio, size)]
    direction = torch.randn(num_rows, key_heads * ratio, size, generator=torch.Generator().manual_seed(9))
    ours, free = (attend(tensors, segments, fixed_order=fixed_order) for fixed_order in (True, False))
    torch.testing.assert_close(ours, free, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad((output * direction).sum(), tensors) for output in (ours, free))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("key_heads", "ratio", "size"), [(2, 2, 8), (3, 3, 64), (1, 1, 12), (1, 5, 16)])
def test_a_sequence_has_the_same_bits_in_any_company(key_heads, ratio, size):
    """Of one to 200 rows, alone or beside others, in any order, with any number of threads."""
    lengths = [1, 2, 5, 31, 32, 33, 64, 100, 130, 200]
    starts = [0, *itertools.accumulate(lengths[:-1])]
    tensors = random_rows(sum(lengths), key_heads, ratio, size)
    segments = [Segment(start, length) for start, length in zip(starts, lengths, strict=True)]
    together = fixed(tensors, segments)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(fixed(tensors, segments[::-1]), together)
        for start, length in zip(starts, lengths, strict=True):
            rows = slice(start, start + length)
            alone = fixed([tensor[:, rows] for tensor in tensors], [Segment(0, length)])
            assert torch.equal(alone, together[rows]), (threads, length)


def test_a_row_has_the_same_bits_however_many_follow_it():
    tensors = random_rows(150, 2, 3, 16)
    whole = fixed(tensors, [Segment(0, 150)])
    for length in (1, 3, 4, 31, 32, 33, 64, 129):
        assert torch.equal(fixed([tensor[:, :length] for tensor in tensors], [Segment(0, length)]), whole[:length])


def test_an_answer_has_the_same_bits_with_any_siblings():
    tensors = random_rows(150, 2, 3, 16)
    group = [Segment(0, 50), Segment(50, 30, 0, 50), Segment(80, 40, 0, 50), Segment(120, 30, 0, 50)]
    whole = fixed(tensors, group)
    for answer in group[1:]:
        rows = [*range(50), *range(answer.start, answer.start + answer.length)]
        pair = [Segment(0, 50), Segment(50, answer.length, 0, 50)]
        assert torch.equal(fixed([tensor[:, rows] for tensor in tensors], pair), whole[rows])


def test_how_many_scores_exist_at_a_time_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    tensors, segments = random_rows(357, 2, 2, 16), SEGMENTS[3][:3]
    at_once = fixed(tensors, segments)
    for scores in (1, 20_000, 200_000):
        monkeypatch.setattr(attention, "SCORES", scores)
        assert torch.equal(fixed(tensors, segments), at_once)


def test_scores_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch):
    """Of 600 rows: 128 at a time, each tile with the keys that its last row may see."""
    tiles: list[tuple[int, int]] = []
    real = attention._sum_of_blocks

    def noted(weights_SGQK: torch.Tensor, value_SGKD: torch.Tensor, blocks: range):
        tiles.append((weights_SGQK.shape[2], blocks.stop))
        return real(weights_SGQK, value_SGKD, blocks)

    monkeypatch.setattr(attention, "_sum_of_blocks", noted)
    fixed(random_rows(600, 1, 1, 4), [Segment(0, 600)])
    assert tiles == [(128, 128), (128, 256), (128, 384), (128, 512), (88, 608)]
    assert BLOCK == 32


def test_what_a_policy_computes_bitwise_is_what_it_computes_close(policy):
    """The whole pass, filled up to whole tiles of rows, and its gradients."""
    sequences = [random_ids(length, seed=length) for length in (5, 37, 1, 64, 12)]
    close, exact = packed_hidden(policy, sequences), packed_hidden(bitwise(policy), sequences)
    for one, other in zip(exact, close, strict=True):
        assert_close(one, other)
    for name, gradient in gradients(policy, exact).items():
        scale = gradient.abs().max()
        assert (gradients(policy, packed_hidden(policy, sequences))[name] - gradient).abs().max() <= 1e-5 * scale, name


# ---- what is not implemented is refused by name


def test_a_sequence_longer_than_the_sliding_window_is_refused():
    policy = make_policy("mistral")
    packed_hidden(policy, [random_ids(16), random_ids(16)])
    with pytest.raises(UserError, match=r"MistralAttention attends within a sliding window of 16 tokens .* has 17"):
        packed_hidden(policy, [random_ids(3), random_ids(17)])
