"""The figures of a run's page: what each is called, what it shows over which denominator, and how a good run looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.reports.record import RunRecord


@dataclass(frozen=True)
class Picture:
    """caption: what it shows, with its denominators; healthy: what a good run looks like here."""

    name: str
    title: str
    caption: str
    healthy: str
    draw: Callable[[RunRecord], Any]


def learning() -> list[Picture]:
    from headway.reports import figures

    return [
        Picture(
            "reward",
            "Reward",
            "Mean reward of the scored rollouts that each step took, and greedy answers to held-out prompts (of those "
            "that could be scored).",
            "both rise and level off; sampled reward that rises alone is a sign of overfitting or of a lax scorer.",
            figures.reward,
        ),
        Picture(
            "length",
            "Response length",
            "Sampled tokens per rollout, and the share of the step's rollouts that the token budget cut off.",
            "lengths settle, and few rollouts are cut off; a rising share means that the budget is too small.",
            figures.response_length,
        ),
        Picture(
            "signal",
            "What could not teach",
            "Groups in which all scored answers earned the same, as a share of the step's groups; rollouts that are no "
            "data, by reason, as a share of the step's rollouts.",
            "well below 100 %; groups with equal rewards grow as prompts become too easy, or stay too hard.",
            figures.signal,
        ),
        Picture(
            "optimizer",
            "Optimizer",
            "Loss and global gradient norm before clipping, each the mean over the optimizer steps of a train step, "
            "and learning rate.",
            "the gradient norm stays within one order of magnitude; a policy-gradient loss need not fall.",
            figures.optimizer,
        ),
        Picture(
            "critic",
            "Critic",
            "Variance of the returns that the values explain, over the trained tokens; the critic's loss and gradient "
            "norm before clipping, means over the optimizer steps of a train step.",
            "explained variance rises above 0 and stays there; below 0 the critic is worse than a constant.",
            figures.critic,
        ),
        Picture(
            "reference",
            "Distance to the reference",
            "KL(pi, reference) before the update, by the estimators k1 and k3, means over the trained tokens; as if pi "
            "had sampled them, which stale ones only come near.",
            "it grows slowly and levels off; a policy that runs away from its reference is often gaming the reward.",
            figures.reference,
        ),
    ]


def trust() -> list[Picture]:
    from headway.reports import trust_figures

    return [
        Picture(
            "mismatch",
            "Mismatch: how much, and where it comes from",
            "KL divergence of the trainer's policy before the update (pi) from the one that sampled (mu), estimator "
            "k3, log axis. Each curve is the mean over its own tokens: all trained ones; those of older versions "
            "(staleness); "
            "those of the newest version that follow older tokens of their answer (stale cache); those of answers that "
            "the newest version sampled alone (numerics); and canaries, a few tokens that it sampled beside the batch "
            "(numerics again). Below: the sources as shares of the trained tokens.",
            "flat, with numerics orders of magnitude below staleness.",
            trust_figures.mismatch,
        ),
        Picture(
            "buckets",
            "Where in lag and in the response",
            "The same divergence, over the trained tokens of each lag and of each stretch of the response; lighter is "
            "early in the run, darker late. Below: their shares of the trained tokens of the run.",
            "it grows a little per version of lag, and is level over the response.",
            trust_figures.buckets,
        ),
        Picture(
            "correction",
            "What the corrections did",
            "Share of the tokens where a weight was cut or masked, or a clip stopped the gradient, by the name of the "
            "weight; of all trained tokens, and of those with positive and with negative advantage.",
            "a few per cent at most, alike on both sides: what acts on one sign alone pulls the policy that way.",
            trust_figures.corrections,
        ),
        Picture(
            "cost",
            "What the mismatch costs",
            "Effective sample size of the uncorrected ratios w = pi / mu, (sum w)^2 / (n sum w^2), as a share of the n "
            "trained tokens; and the mean of w^2, by which they multiply the variance of an estimate: over tokens, and "
            "over answers with the product of each answer's ratios.",
            "near 100 % and near 1; whole answers cost more the longer they are.",
            trust_figures.cost,
        ),
        Picture(
            "entropy",
            "Entropy",
            "Mean entropy of the trainer's distribution before the update, over the trained tokens.",
            "it falls slowly; near 0 all answers to a prompt are the same, and nothing is left to compare.",
            trust_figures.entropy,
        ),
        Picture(
            "ratios",
            "Probability ratios",
            "w = pi / mu, quantiles over the trained tokens.",
            "narrow bands centred on 1 that don't widen; wide bands mean stale or mismatched samples.",
            trust_figures.ratios,
        ),
        Picture(
            "estimates",
            "Both directions, both estimators",
            "KL(mu, pi) and KL(pi, mu), means over the trained tokens.",
            "alike, k1 within its noise; where k3 parts, a few tokens with large ratios make most of it.",
            trust_figures.estimates,
        ),
        Picture(
            "interpolation",
            "Guessed proximal policy",
            "The guess between mu and the current policy against the true log-prob before the train step; mean and "
            "largest over the trained tokens.",
            "small against 1, as the ratios are clipped around it.",
            trust_figures.interpolation,
        ),
        Picture(
            "lag",
            "Lag",
            "How many versions older than the trainer the tokens were when their batch was taken: over the step's "
            "rollouts (each by its oldest token) and over its tokens.",
            "the mean stays at or below run_ahead; the oldest rollout may exceed it, by stragglers, but doesn't climb.",
            trust_figures.lag,
        ),
    ]


def fairness() -> list[Picture]:
    from headway.reports import fairness_figures

    return [
        Picture(
            "lengths",
            "Mean length, trained against started",
            "Of the rollouts that each step took, and of all that were started since the step before and have ended, "
            "whatever became of them; points: those dropped, interrupted, filtered out or thrown away meanwhile. With "
            "order finished the first batches hold short answers, as the long ones are not done yet; these follow "
            "later. Dropping them, or ending the run, makes the bias permanent. Below: the ratio of the means over all "
            "steps so far.",
            "the two curves meet after the first steps, and the ratio comes to 1; below 1 long answers are trained too "
            "rarely.",
            fairness_figures.trained_length,
        ),
        Picture(
            "fates",
            "Lengths by what became of them",
            "All rollouts that have ended, by their length. One that was thrown away counts as far as it had come, "
            "unless it began again.",
            "one colour over the whole range; another one at the long end means that long answers are left out.",
            fairness_figures.length_histogram,
        ),
    ]


def hardware(run: RunRecord) -> list[Picture]:
    from headway.reports import figures, gantt, simulated_timeline

    again = Picture(
        "simulated",
        "The same run, simulated from its trace",
        "The same schedule on virtual time: each rollout, score, train step, sync and checkpoint takes as long as it "
        "took in the run, and nothing else takes any.",
        "like the picture above, and hardly shorter (what is missing is time that no stage accounts for); then "
        "headway simulate --replay RUN tells what another schedule would have given.",
        simulated_timeline.figure,
    )
    return [
        Picture(
            "timeline",
            "Timeline",
            "Each bar is a rollout in its lane, coloured by the version it began with; at the bottom, the train steps. "
            "Drag to move.",
            "lanes without gaps; the trainer waits for rollouts rather than rollouts for the trainer.",
            gantt.gantt,
        ),
        *([again] if run.simulated else []),
        Picture(
            "utilization",
            "Utilisation",
            "Busy share of the time between one step's end and the next: of all lanes, and of the trainer.",
            "lanes near 100 %; dips where an evaluation holds back the new weights.",
            figures.utilization,
        ),
        Picture(
            "throughput",
            "Throughput",
            "Tokens sampled (evaluations included) and trained per unit of time, step by step.",
            "level, and falling only as responses grow longer; sampled and trained stay close.",
            figures.throughput,
        ),
        Picture(
            "cache",
            "The engine's cache",
            "Blocks of keys and values that rollouts stood on, of all there are, in the fullest moment since the step "
            "before; and how often a rollout gave way because there were none left, per trained rollout.",
            "room to spare, and nobody gives way: whoever does is computed again.",
            figures.cache,
        ),
    ]
