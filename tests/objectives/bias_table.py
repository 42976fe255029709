"""The table of bias and variance in `docs/objectives.md`. `python -m tests.objectives.bias_table` refreshes it.

Everything in it is an exact sum over all answers of up to 4 tokens; only the pairs of policies are drawn, and they are
fixed by their seeds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from headway.objectives.named import objective
from headway.objectives.parts import Objective
from tests.objectives.enumeration import Gradients, Policies, Toy, exact_gradient, gradients_of_answers, relative

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"
BEGIN, END = "<!-- bias table -->", "<!-- end of bias table -->"
NOISES = [0.02, 0.1, 0.3, 1.0]
NUM_DRAWS = 10

ROWS: dict[str, tuple[tuple[str, ...], bool]] = {
    # what the page calls it: (corrections, self-normalised)
    "none": ((), False),
    "`is`": (("is",), False),
    "`tis`": (("tis",), False),
    "`tis`, self-normalised": (("tis",), True),
    "`clamped_is`": (("clamped_is",), False),
    "`mis`": (("mis",), False),
    "`icepop`": (("icepop",), False),
    "`icepop_glm5`": (("icepop_glm5",), False),
    "`veto`, `tis`": (("veto", "tis"), False),
    "`sequence_is`": (("sequence_is",), False),
    "`sequence_tis`": (("sequence_tis",), False),
    "`sequence_tis`, self-normalised": (("sequence_tis",), True),
    "`sequence_mis`": (("sequence_mis",), False),
    "`geometric_rejection`": (("geometric_rejection",), False),
    "`geometric_rejection_is`": (("geometric_rejection_is",), False),
    "`k3_rejection`": (("k3_rejection",), False),
    "`k3_rejection`, `tis`": (("k3_rejection", "tis"), False),
    "`off_policy_mask`": (("off_policy_mask",), False),
}


def described(corrections: tuple[str, ...], self_normalised: bool) -> Objective:
    """REINFORCE, `A grad log pi` summed over an answer, with corrections on it."""
    return objective("reinforce", advantage="reward", corrections=corrections, self_normalise=self_normalised)


def bias_and_variance(row: Objective, policies: Policies) -> tuple[float, float]:
    """Of the gradient of one sampled answer, A = r - E_mu[r]: |bias| by |exact|, and variance by |exact|^2."""
    toy = policies.toy
    exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
    found = gradients_of_answers(row, policies, toy.reward_Y - policies.probability_Y @ toy.reward_Y)
    whole_answers = any(weight.ratio.level != "token" for weight in row.terms[0].weights)
    spread = _with_normaliser(found, toy, whole_answers) if row.self_normalise else found.variance
    return relative(found.mean_P, exact_P), spread / float(exact_P.square().sum())


def _with_normaliser(found: Gradients, toy: Toy, whole_answers: bool) -> float:
    """The variance per answer in the limit of large batches, where the mean weight is a sample too (delta method)."""
    if whole_answers:
        excess_Y = toy.sum_Y(found.importance_M) / toy.length_Y - 1
    else:
        excess_Y = (toy.sum_Y(found.importance_M) - toy.length_Y) / (found.probability_B @ toy.length_Y.double())
    influence_YP = found.gradient_BP - excess_Y[:, None] * found.mean_P
    return Gradients(influence_YP, found.probability_B, found.importance_M, found.acted).variance


def draws(noise: float) -> list[Policies]:
    """Pairs of pi = pi_prox and mu, whose logits differ by `noise` times standard normal numbers."""
    toy = Toy(4)
    return [Policies.random(toy, seed, mismatch=noise) for seed in range(NUM_DRAWS)]


def total_variation(policies: Policies) -> float:
    probability_Y: Tensor = policies.probability_Y
    return float((probability_Y * (policies.weight_Y - 1)).abs().sum() / 2)


def table() -> str:
    """Markdown: a row per correction, a column per size of mismatch, each cell `bias / variance`."""
    pairs = {noise: draws(noise) for noise in NOISES}
    distances = [f"{mean(map(total_variation, pairs[noise])):.3f}" for noise in NOISES]
    lines = [_line("correction", *(f"{noise:g}" for noise in NOISES)), _line("---", *("---:" for _ in NOISES))]
    lines.append(_line("total variation of mu and pi", *distances))
    for name, (corrections, self_normalised) in ROWS.items():
        row = described(corrections, self_normalised)
        lines.append(_line(name, *(_cell([bias_and_variance(row, drawn) for drawn in pairs[n]]) for n in NOISES)))
    return "\n".join(lines)


def _cell(numbers: list[tuple[float, float]]) -> str:
    bias, variance = (mean(column) for column in zip(*numbers, strict=True))
    return f"{bias:.3f} / {variance:.0f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def on_page(text: str) -> str:
    """What stands between the markers."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def write() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text.replace(on_page(text), table()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
    print(f"wrote the table into {PAGE}")
