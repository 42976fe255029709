"""Seeds, played and audited: what a person asks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headway.simulate.audit import kept_fates, problems
from headway.simulate.faults import DEATHS, DISTURBANCES, Scenario, scenario
from headway.simulate.lives import History, Life, Live, play
from headway.types import UserError


@dataclass(frozen=True)
class Trial:
    """A scenario, how it was played, and what was wrong with that: nothing, or so many sentences."""

    scenario: Scenario
    history: History
    problems: list[str]

    @property
    def failure(self) -> str:
        """The scenario, and what was wrong."""
        return "\n".join([str(self.scenario), *(f"  WRONG: {problem}" for problem in self.problems)])

    def __str__(self) -> str:
        """The scenario, its lives and what came of it, in lines."""
        fates = Counter(kept_fates(self.scenario, self.history).values())
        came_of_it = ", ".join(f"{num} {fate}" for fate, num in sorted(fates.items())) or "nothing was trained"
        lives = [f"  life {number}: {_told(life)}" for number, life in enumerate(self.history.lives)]
        wrong = [f"  WRONG: {problem}" for problem in self.problems] or ["  every rule held"]
        return "\n".join([str(self.scenario), *lives, f"  groups: {came_of_it}", *wrong])


def _told(life: Life) -> str:
    began = f"from version {life.began_from.progress['version']}" if life.began_from else "afresh"
    last = life.events[-1] if life.events else None
    until = f"{len(life.events)} events, until {last.at_s:g}" if last else "no event"
    hit = f"; hit by {', '.join(fault.kind for fault in life.hit)}" if life.hit else ""
    end = f"died of {life.died_of.kind}" if life.died_of else f"broke off: {life.error}" if life.error else "ended"
    return f"{began}; {until}{hit}; {end}"


@dataclass
class Tally:
    """Of many trials: how many scenarios each kind of fault struck, how many failed, lives and events in all."""

    num: int = 0
    num_lives: int = 0
    num_events: int = 0
    failed: list[int] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)

    def count(self, trial: Trial) -> None:
        lives = trial.history.lives
        self.num += 1
        self.num_lives += len(lives)
        self.num_events += sum(len(life.events) for life in lives)
        if trial.problems:
            self.failed.append(trial.scenario.seed)
        hit = {fault.kind for life in lives for fault in life.hit}
        died = {life.died_of.kind for life in lives if life.died_of}
        self.struck.update(hit | died or {"no fault"})

    def __str__(self) -> str:
        kinds = (*DEATHS, *DISTURBANCES, "no fault")
        width = max(map(len, kinds))
        table = [f"  {kind:<{width}}  {self.struck[kind]:>6}" for kind in kinds]
        failed = f"{len(self.failed)} failed: {', '.join(map(str, self.failed[:20]))}" if self.failed else "none failed"
        return "\n".join(
            [
                f"{self.num} scenarios, {self.num_lives} lives, {self.num_events} events; {failed}",
                "scenarios struck by",
                *table,
            ]
        )


def trials(seeds: Iterable[int], live: Live) -> Iterator[Trial]:
    """Each seed, played and audited."""
    for seed in seeds:
        drawn = scenario(seed)
        history = play(drawn, live)
        yield Trial(drawn, history, problems(drawn, history))


def parse_seeds(spec: str) -> range:
    """
    >>> parse_seeds("0..999"), parse_seeds("17")
    (range(0, 1000), range(17, 18))
    """
    first, dots, last = spec.partition("..")
    try:
        seeds = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise UserError(
            f"--faults {spec} is not understood; it may be a seed, as in 17, or seeds as in 0..999"
        ) from None
    if not seeds or seeds[0] < 0:
        raise UserError(f"--faults {spec} holds no seed; it may be a seed, as in 17, or seeds as in 0..999")
    return seeds
