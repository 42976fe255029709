"""The parts of an objective as data: which function, which values, which formula. Free of torch.

An objective is a sum of terms. A term is a loss per token (or rollout, or pair), times constant weights that correct
for the policy that sampled, under a named reduction. `compose.py` turns such a description into functions,
`refusals.py` says which descriptions are silently wrong, `describe.py` prints them.

Policies: `current` is the one being optimised (pi), `proximal` the trainer's before this train step (pi_prox),
`behaviour` the one that each token was really sampled from (mu). `sg` stops a gradient.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

PolicyName = Literal["current", "proximal", "behaviour"]
RatioLevel = Literal["token", "sequence", "geometric", "geometric_token"]
TermLevel = Literal["token", "rollout", "pair"]
Act = Literal["truncate", "mask", "keep", "keep_k3", "veto", "clip_mask", "off_policy_mask"]
AdvantageName = Literal[
    "group_mean", "group_mean_std", "leave_one_out", "group_mean_batch_std", "batch_mean", "reward", "gae", "preference"
]
ReductionName = Literal[
    "token_mean", "rollout_mean_token_mean", "rollout_mean_token_sum", "constant", "prompt_mean", "pair_mean"
]
KLEstimator = Literal["k1", "k2", "k3", "k3_value_k2_gradient", "k1_corrected", "k2_corrected", "k3_corrected"]
FilterName = Literal["zero_variance", "truncated"]
ProximalName = Literal["recomputed", "interpolated"]

SYMBOLS: dict[str, str] = {"current": "pi", "proximal": "pi_prox", "behaviour": "mu"}


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name that is most like `name`."""
    return max(sorted(valid), key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())


def check_name(what: str, name: str, valid: Iterable[str]) -> None:
    """Raises ValueError, naming the nearest valid choice, for a name that is not among the valid ones."""
    names = sorted(valid)
    if name not in names:
        raise ValueError(
            f"unknown {what} {name!r}; the nearest valid name is {nearest(name, names)} (valid: {', '.join(names)})"
        )


def check_range(what: str, value: float, above: float, up_to: float = inf) -> None:
    """Raises ValueError unless above < value <= up_to."""
    if not above < value <= up_to:
        bound = "" if up_to == inf else f" and at most {up_to:g}"
        raise ValueError(f"{what} {value:g} must be above {above:g}{bound}")


@dataclass(frozen=True)
class Gives:
    """What a KL estimator's value and its gradient as a loss are the mean of, "" for none.

    corrected: under samples of any policy whose log-probs were recorded; else under samples of pi.
    """

    value: str
    gradient: str
    corrected: bool = False


KL_ESTIMATORS: dict[KLEstimator, Gives] = {
    "k1": Gives("KL(pi, ref)", ""),
    "k2": Gives("", "KL(pi, ref)"),
    "k3": Gives("KL(pi, ref)", "KL(ref, pi)"),
    "k3_value_k2_gradient": Gives("KL(pi, ref)", "KL(pi, ref)"),
    "k1_corrected": Gives("KL(pi, ref)", "KL(pi, ref)", corrected=True),
    "k2_corrected": Gives("", "KL(pi, ref)", corrected=True),
    "k3_corrected": Gives("KL(pi, ref)", "KL(pi, ref)", corrected=True),
}
"""What each estimator in a loss really gives: see `kl.py`."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """`exp(log new - log old)` of a token, or of its whole rollout.

    level: token; sequence: the product over the rollout's trained tokens; geometric: the geometric mean of those, one
    number per rollout; geometric_token: the value of the geometric mean with each token's own gradient.
    """

    new: PolicyName = "current"
    old: PolicyName = "proximal"
    level: RatioLevel = "token"

    def __post_init__(self) -> None:
        check_name("policy", self.new, ("current", "proximal"))
        check_name("policy", self.old, ("proximal", "behaviour"))
        check_name("level of a ratio", self.level, get_args(RatioLevel))
        if self.new == self.old:
            raise ValueError(f"the ratio of {self.new} to itself is always 1")

    @property
    def formula(self) -> str:
        ratio = f"{SYMBOLS[self.new]}/{SYMBOLS[self.old]}"
        return {
            "token": ratio,
            "sequence": f"prod_t {ratio}",
            "geometric": f"(prod_t {ratio})^(1/len)",
            "geometric_token": f"sg((prod_t {ratio})^(1/len)) pi/sg(pi)",
        }[self.level]


STALENESS = Ratio(new="current", old="proximal")
MISMATCH = Ratio(new="proximal", old="behaviour")
WHOLE = Ratio(new="current", old="behaviour")
"""The ratio that is needed, and its two factors: Zheng et al. 2025, arXiv 2512.01374."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A constant factor of a term's loss, from a ratio w. It never carries a gradient.

    name: what diagnostics call it. What it gives:

    | act | factor |
    |---|---|
    | truncate | w, clipped into [low, high] |
    | mask | w inside [low, high], 0 outside |
    | keep | 1 inside [low, high], 0 outside |
    | keep_k3 | 1 while the rollout's mean of w - 1 - log w is at most high, else 0 |
    | veto | 0 for a rollout that has any token with w < low, else 1 |
    | clip_mask | 0 where PPO's clip to [low, high] would stop the gradient, by the sign of A, else 1 |
    | off_policy_mask | 0 for a rollout with A < 0 and mean of -log w above high, else 1 |

    Bounds count as inside.
    """

    name: str
    ratio: Ratio
    act: Act
    low: float = 0.0
    high: float = inf
    source: str = ""

    def __post_init__(self) -> None:
        check_name("act of a weight", self.act, get_args(Act))
        if not 0 <= self.low <= self.high:
            raise ValueError(f"{self.name}: low {self.low:g} must be at least 0 and at most high {self.high:g}")
        if self.high == 0 and self.act in ("truncate", "mask"):
            raise ValueError(f"{self.name}: with high 0 every weight is 0, and nothing is learned")
        never = self.high == inf and (self.act in ("keep_k3", "off_policy_mask") or (not self.low and self.binary))
        if never or (self.act == "mask" and not self.low and self.high == inf):
            raise ValueError(f"{self.name} never acts without a bound")

    @property
    def binary(self) -> bool:
        """Keeps or leaves out, and does not rescale."""
        return self.act not in ("truncate", "mask")

    @property
    def bounded(self) -> bool:
        return self.binary or self.high < inf

    @property
    def formula(self) -> str:
        w, low, high = self.ratio.formula, f"{self.low:g}", f"{self.high:g}"
        band = f"{low} <= {w} <= {high}" if self.low else f"{w} <= {high}"
        if self.act == "truncate":
            capped = f"max({w}, {low})" if self.low else w
            return f"min({capped}, {high})" if self.high < inf else capped
        return {
            "mask": f"{w} 1[{band}]",
            "keep": f"1[{band}]",
            "keep_k3": f"1[mean_t (w - 1 - log w) <= {high}], w = {w}",
            "veto": f"1[min_t {w} >= {low}]",
            "clip_mask": f"1[not (A > 0 and {w} > {high}) and not (A < 0 and {w} < {low})]",
            "off_policy_mask": f"1[not (A < 0 and mean_t -log {w} > {high})]",
        }[self.act]


@dataclass(frozen=True, kw_only=True)
class ScoreFunction:
    """`-A log pi`: every token keeps its gradient, whatever its weights are. Williams 1992, REINFORCE."""

    @property
    def formula(self) -> str:
        return "A log pi"


@dataclass(frozen=True, kw_only=True)
class PolicyRatio:
    """`-rho A`, rho with its gradient. Schulman et al. 2017, arXiv 1707.06347, equation 6."""

    ratio: Ratio = field(default_factory=Ratio)

    @property
    def formula(self) -> str:
        return f"{self.ratio.formula} A"


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`; dual_clip: c > 1 bounds it by c A where A < 0."""

    ratio: Ratio = field(default_factory=Ratio)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, above=0.0, up_to=1.0)
        check_range("clip_high", self.clip_high, above=0.0)
        if self.dual_clip is not None:
            check_range("dual_clip", self.dual_clip, above=1.0)

    @property
    def formula(self) -> str:
        rho = self.ratio.formula
        clipped = f"min(rho A, clip(rho, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"
        if self.dual_clip is not None:
            clipped = f"max({clipped}, {self.dual_clip:g} A where A < 0)"
        return f"{clipped}, rho = {rho}"


@dataclass(frozen=True, kw_only=True)
class Clamped:
    """`-clip(rho, 1 - clip_low, 1 + clip_high) A`: no gradient outside, whatever the sign of A."""

    ratio: Ratio = field(default_factory=Ratio)
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, above=0.0, up_to=1.0)
        check_range("clip_high", self.clip_high, above=0.0)

    @property
    def formula(self) -> str:
        return f"clip({self.ratio.formula}, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A"


@dataclass(frozen=True, kw_only=True)
class SquaredLogRatio:
    """`(log rho)^2`: pulls the current policy towards the old one."""

    ratio: Ratio = field(default_factory=Ratio)

    @property
    def formula(self) -> str:
        return f"-(log {self.ratio.formula})^2"


@dataclass(frozen=True, kw_only=True)
class ReferenceKL:
    """An estimate per token of a KL divergence to the frozen reference."""

    estimator: KLEstimator = "k2"

    def __post_init__(self) -> None:
        check_name("KL estimator", self.estimator, get_args(KLEstimator))

    @property
    def formula(self) -> str:
        return f"-{self.estimator}(pi, ref)"


@dataclass(frozen=True, kw_only=True)
class ClippedValue:
    """`1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)`, of the critic; None: no clip."""

    value_clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.value_clip is not None:
            check_range("value_clip", self.value_clip, above=0.0)

    @property
    def formula(self) -> str:
        if self.value_clip is None:
            return "-1/2 (V - R)^2"
        return f"-1/2 max((V - R)^2, (clip(V, V_old -+ {self.value_clip:g}) - R)^2)"


@dataclass(frozen=True, kw_only=True)
class Preference:
    """`-log sigmoid(beta (log pi/ref of the best answer - log pi/ref of the worst))`, one number per pair."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_range("beta", self.beta, above=0.0)

    @property
    def formula(self) -> str:
        return f"log sigmoid({self.beta:g} (log pi(y+)/ref(y+) - log pi(y-)/ref(y-)))"


WithRatio = PolicyRatio | Clipped | Clamped | SquaredLogRatio
"""Losses whose gradient comes through a ratio."""

Loss = ScoreFunction | PolicyRatio | Clipped | Clamped | SquaredLogRatio | ReferenceKL | ClippedValue | Preference


@dataclass(frozen=True, kw_only=True)
class Term:
    """`coefficient * reduction(product of weights * loss)`."""

    loss: Loss
    weights: tuple[Weight, ...] = ()
    reduction: ReductionName = "token_mean"
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_name("reduction", self.reduction, get_args(ReductionName))
        check_range("coefficient of a term", self.coefficient, above=0.0)
        if (self.reduction == "pair_mean") != isinstance(self.loss, Preference):
            raise ValueError("the reduction pair_mean belongs to the preference loss, and to no other")

    @property
    def level(self) -> TermLevel:
        """The smallest unit that its loss is a function of; one unit is never split over micro-batches."""
        if isinstance(self.loss, Preference):
            return "pair"
        by_rollout = any(weight.act in ("keep_k3", "veto", "off_policy_mask") for weight in self.weights)
        return "rollout" if by_rollout or any(ratio.level != "token" for ratio in self.ratios) else "token"

    @property
    def uses_advantage(self) -> bool:
        """A policy term: the one that overrides and corrections act on."""
        return isinstance(self.loss, ScoreFunction | PolicyRatio | Clipped | Clamped)

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Every ratio in it, the one with the gradient first."""
        own = (self.loss.ratio,) if isinstance(self.loss, WithRatio) else ()
        return (*own, *(weight.ratio for weight in self.weights))


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """Rewards -> advantages: see the function of that name in `advantages.py`.

    whiten: afterwards, to mean 0 and standard deviation 1 over all trained tokens of the batch. gamma, lam: of gae.
    """

    name: AdvantageName
    whiten: bool = False
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        check_name("advantage", self.name, get_args(AdvantageName))
        for what, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"{what} {value:g} must be between 0 and 1")

    @property
    def compares_group(self) -> bool:
        """A baseline of the rollouts of one prompt: a group needs at least two."""
        return self.name not in ("batch_mean", "reward", "gae")

    @property
    def formula(self) -> str:
        raw = {
            "group_mean": "r - mean of the group",
            "group_mean_std": "(r - mean of the group) / (std of the group, ddof 1, + 1e-6)",
            "leave_one_out": "r - mean of the group's other rollouts",
            "group_mean_batch_std": "(r - mean of the group) / (std of those over the batch, ddof 1, + 1e-6)",
            "batch_mean": "r - mean of the batch",
            "reward": "r",
            "gae": f"sum_l ({self.gamma:g} x {self.lam:g})^l delta_(t+l), delta_t = r_t + {self.gamma:g} V_(t+1) - V_t",
            "preference": "+1 for the best rollout of a group, -1 for the worst, 0 for the rest",
        }[self.name]
        return f"whitened over the batch's tokens: {raw}" if self.whiten else raw


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """A penalty on answers that come near the token budget: 0 up to budget - cache_share * budget, then linear to -1.

    Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.4 (20,480 tokens, the last 4,096 of them penalised).
    """

    cache_share: float = 0.2

    def __post_init__(self) -> None:
        check_range("overlong_share", self.cache_share, above=0.0, up_to=1.0)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A whole objective.

    source: paper and section; notes: what of it lies outside the loss, or is not from the source. reward_kl: how much
    of the k1 estimate of KL(pi_prox, ref) that comes off each token's reward. filters: which rollouts are no data.
    retire_above: a prompt whose pass rate reached it is not asked again. self_normalise: weights are divided by their
    mean over an optimizer step. length: the constant of the reduction `constant`, in tokens. unsound: refusals are
    overridden.
    """

    name: str
    source: str
    advantage: Advantage
    terms: tuple[Term, ...]
    reward_kl: float = 0.0
    overlong: Overlong | None = None
    filters: tuple[FilterName, ...] = ()
    retire_above: float | None = None
    self_normalise: bool = False
    proximal: ProximalName = "recomputed"
    length: int | None = None
    unsound: bool = False
    notes: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("proximal policy", self.proximal, get_args(ProximalName))
        for name in self.filters:
            check_name("filter", name, get_args(FilterName))
        if self.reward_kl < 0:
            raise ValueError(f"reward_kl {self.reward_kl:g} must not be below 0")
        if self.retire_above is not None:
            check_range("retire_above", self.retire_above, above=0.0, up_to=1.0)
        if self.length is not None:
            check_range("length", self.length, above=0.0)
        needs_pairs = any(isinstance(term.loss, Preference) for term in self.terms)
        if needs_pairs != (self.advantage.name == "preference"):
            raise ValueError("the preference loss and the advantage preference belong together")
        # Another reward than the outcome would choose another pair than the one that is data; half a pair is none.
        if needs_pairs and (self.reward_kl or self.overlong or self.advantage.whiten or self.filters):
            raise ValueError(
                f"{self.name} pairs the best outcome with the worst: leave out reward_kl, overlong_share, whiten and "
                "filters"
            )

    @property
    def value_term(self) -> Term | None:
        return next((term for term in self.terms if isinstance(term.loss, ClippedValue)), None)

    @property
    def level(self) -> TermLevel:
        """What must not be split over micro-batches: rollouts never are, and pairs only if a term needs them whole."""
        levels = {term.level for term in self.terms}
        return "pair" if "pair" in levels else "rollout" if "rollout" in levels else "token"

    # ---- what it needs

    @property
    def needs_reference(self) -> bool:
        return self.reward_kl > 0 or any(isinstance(term.loss, ReferenceKL | Preference) for term in self.terms)

    @property
    def needs_critic(self) -> bool:
        return self.advantage.name == "gae"

    @property
    def needs_behaviour(self) -> bool:
        """Log-probs that the engine records as each token is sampled."""
        in_ratios = any(ratio.old == "behaviour" for term in self.terms for ratio in term.ratios)
        in_kl = any(isinstance(t.loss, ReferenceKL) and KL_ESTIMATORS[t.loss.estimator].corrected for t in self.terms)
        return in_ratios or in_kl or self.proximal == "interpolated"

    @property
    def corrects_behaviour(self) -> bool:
        """Its policy terms weigh each token by a ratio to the policy that sampled it, or need no such weight.

        A geometric mean over an answer is no such ratio: it says how far the answer is, not how likely it was.
        """
        return all(
            any(
                ratio.old == "behaviour" and "geometric" not in ratio.level and not self._only_binary(term, ratio)
                for ratio in term.ratios
            )
            for term in self.terms
            if term.uses_advantage
        )

    @staticmethod
    def _only_binary(term: Term, ratio: Ratio) -> bool:
        """The ratio only decides whether a token counts, so what is kept is still weighted wrongly."""
        own = getattr(term.loss, "ratio", None)
        return ratio is not own and all(weight.binary for weight in term.weights if weight.ratio is ratio)

    def needs_proximal(self, optimizer_steps: int) -> bool:
        """Whether log-probs under the weights before the train step have to be computed by an extra forward pass.

        With one optimizer step per batch they are the current ones, and come out of the loss's own forward pass, unless
        something has to be known of the whole batch before.
        """
        if self.reward_kl > 0 or self.self_normalise:
            return True
        compares = any("proximal" in (ratio.new, ratio.old) for term in self.terms for ratio in term.ratios)
        return optimizer_steps > 1 and compares and self.proximal == "recomputed"
