"""The commands: train, simulate, report, export, objectives, mismatch, plan, fit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from headway import config as settings
from headway.mismatch.setting import LOOKED_AT as PROBED
from headway.mismatch.setting import Options, Request, request
from headway.plan.states import PRECISIONS
from headway.planning import request as planned
from headway.types import UserError, did_you_mean, nearest

if TYPE_CHECKING:
    from headway.plan.here import HerePlan
    from headway.scaling.fit import Asked

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def _keys_help(looked_at: tuple[str, ...] | None = None) -> str:
    """Every key with its type, default and meaning, for the end of a command's help; or those that it looks at."""
    lines = [
        "Any setting may be given as --section.key VALUE, or --key VALUE where that is unambiguous; words are "
        "separated by commas, and none takes back an optional setting of the recipe:"
    ]
    for key, info in settings.fields():
        if looked_at is None or {key, key.split(".")[0]} & set(looked_at):
            default = info.get_default(call_default_factory=True)
            meaning = f" {info.description}" if info.description else ""
            shown = "" if default in (None, (), {}) else f", default {default}"
            lines.append(f"--{key.replace('_', '-')} ({settings.choices(info.annotation)}{shown}){meaning}")
    return "\n\n".join(lines)


_SIMULATED = (
    *("run.seed", "run.steps", "generate.lanes", "evaluate.size", "evaluate.every"),
    *("schedule", "simulate"),
)
_USUAL_SWEEP = "run_ahead=0..8"


def _words(context: typer.Context) -> list[str]:
    """What a command was given beside its own options; one of those, misspelt, is taken for no setting.

    Raises UserError.
    """
    own = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    for word in context.args:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not settings.is_known(flag[2:]) and (near := nearest(flag, own, cutoff=0.8)):
            raise UserError(f"unknown option {flag}{did_you_mean(*near)}")
    return list(context.args)


def _recipe_first(words: list[str]) -> tuple[Path | None, list[str]]:
    """A command's own words: a recipe, if the first one is no override, and the overrides."""
    if words and not words[0].startswith("--"):
        return Path(words[0]), words[1:]
    return None, words


@app.callback(help="Reinforcement learning for language models, with generation running ahead by a bounded distance.")
def _commands() -> None: ...


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(_SIMULATED), options_metavar="[RECIPE] [OPTIONS]")
def simulate(
    context: typer.Context,
    timeline: Annotated[bool, typer.Option("--timeline", help="draw lanes and trainer as text")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as one JSON object; of a sweep, as a list of them")
    ] = False,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUES",
            help="one run for each value, as in run_ahead=0..8, window=1..64..8 or order=finished,started; several "
            "multiply",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help=f"write a page of pictures with controls that choose a run; without --sweep, of {_USUAL_SWEEP}",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="a recorded run again, with the lengths and times of its trace"),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="scenarios of crashes and other faults by their seeds, as in 0..999, each played and audited; of one "
            "seed, as in 17, all that happened",
        ),
    ] = None,
) -> None:
    """Run the schedule on virtual time.

    With --replay RUN: what would that run have given under another schedule?
    """
    if faults is not None:
        if context.args or timeline or as_json or sweeps or page or replay:
            raise UserError("--faults draws every setting from its seeds; leave the others out")
        _try_faults(faults)
        return
    if timeline and as_json:
        raise UserError("--timeline is no JSON; leave it out, or --json")
    recipe, overrides = _recipe_first(_words(context))
    if replay:
        recipe = _recipe_of(replay, recipe)
    if sweeps or page:
        if timeline:
            raise UserError("--timeline draws one run; leave it out, or --sweep and --page")
        _sweep(recipe, overrides, sweeps or [], replay, page, as_json=as_json)
    else:
        _simulate_one(recipe, overrides, replay, timeline=timeline, as_json=as_json)


def _try_faults(spec: str) -> None:
    """Exit status 1 if a rule was broken."""
    from headway.simulate.trial import Tally, parse_seeds
    from headway.simulation import try_faults

    seeds, tally = parse_seeds(spec), Tally()
    for trial in try_faults(seeds):
        tally.count(trial)
        if len(seeds) == 1:
            print(trial)
        elif trial.problems:
            print(trial.failure)
        if tally.num % 100 == 0:
            print(f"{tally.num} of {len(seeds)} scenarios, {len(tally.failed)} failed", file=sys.stderr)
    if len(seeds) > 1:
        print(tally)
    if tally.failed:
        raise SystemExit(1)


def _recipe_of(replayed: Path, recipe: Path | None) -> Path:
    """The configuration of the run that is replayed."""
    if recipe:
        raise UserError(f"--replay {replayed} brings its own recipe; leave {recipe} out")
    if not (replayed / "config.toml").is_file():
        raise UserError(f"there is no run to replay in {replayed}: it holds no config.toml")
    return replayed / "config.toml"


def _simulate_one(
    recipe: Path | None, overrides: list[str], replayed: Path | None, *, timeline: bool, as_json: bool
) -> None:
    from headway import program, simulation
    from headway.reports import summary, text_timeline, wording

    config = _simulated_config(recipe, overrides, replayed)
    events = simulation.replay(replayed, overrides) if replayed else simulation.simulate(config)
    lines = summary.timeline(events)
    figures = summary.summarise(lines, events, config.simulate.skip_steps)
    if timeline:
        print(text_timeline.render(lines))
    print(json.dumps(figures, allow_nan=False) if as_json else wording.simulated(figures, program.bound(config).why))


def _simulated_config(recipe: Path | None, overrides: list[str], replayed: Path | None) -> settings.Config:
    resolved = settings.resolve(recipe, overrides)
    if not replayed:  # a replay looks at others, and says so
        settings.only(resolved.origins, _SIMULATED, "headway simulate")
    return resolved.config


def _sweep(
    recipe: Path | None,
    overrides: list[str],
    sweeps: list[str],
    replayed: Path | None,
    page: Path | None,
    *,
    as_json: bool,
) -> None:
    from headway import sweep
    from headway.reports import sweep_table

    swept = sweep.parse(sweeps or [_USUAL_SWEEP])
    jobs = sweep.jobs(recipe, overrides, swept, replayed=replayed, for_page=page is not None)
    if not replayed:
        settings.only(jobs[0].resolved.origins, _SIMULATED, "headway simulate")
    _check_file("--page", page)
    if not sweeps:
        print(f"--page without --sweep: of {_USUAL_SWEEP}", file=sys.stderr)
    with sweep_table.progress(len(jobs)) as done:
        runs = sweep.simulate(jobs, done)
    if as_json:
        print(json.dumps([run.to_json() for run in runs], allow_nan=False))
    else:
        sweep_table.show(runs, sys.stdout)
    if page:
        from headway.reports import simulation_page

        chosen = sweep.without_sweep(jobs, recipe, overrides)
        simulation_page.write(page, runs, chosen, jobs[chosen].resolved, replayed=replayed)
        print(f"page: {page}", file=sys.stderr if as_json else sys.stdout)


def _check_file(option: str, path: Path | None) -> None:
    """Before anything is computed for it."""
    if path and path.is_dir():
        raise UserError(f"{option} {path} is a folder; give the name of a file in it")
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(), options_metavar="RECIPE [OPTIONS]")
def train(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would run, and run nothing")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="go on with the run in this folder")] = None,
) -> None:
    """Train a policy by reinforcement learning, as a recipe says."""
    from headway import run
    from headway.reports.folder import choose_folder

    recipe, overrides = _recipe_first(_words(context))
    if resume and recipe:
        raise UserError(f"--resume {resume} brings its own recipe; leave {recipe} out")
    if resume and not (resume / "config.toml").is_file():
        raise UserError(f"there is no run to resume in {resume}: it holds no config.toml")
    if resume is None and recipe is None:
        raise UserError(f"which recipe? headway train RECIPE, for instance {_some_recipe()}")
    resolved = settings.resolve(resume / "config.toml" if resume else recipe, overrides)
    if dry_run:
        print(run.describe(resolved), end="")
        return
    folder = resume or choose_folder(resolved.config.run)
    try:
        run.train(resolved, folder, resume=resume is not None)
    except KeyboardInterrupt:
        print(f"\nheadway: interrupted; {run.what_is_left(folder)}", file=sys.stderr)
        sys.exit(130)
    print(f"writing the page of {folder}", file=sys.stderr)
    print(run.report(folder))


def _some_recipe() -> str:
    return str(next(iter(sorted(Path("recipes").glob("*.toml"))), "recipes/quickstart.toml"))


@app.command()
def report(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]) -> None:
    """Write the page of a run, finished or not."""
    from headway import run

    print(run.report(run_folder))


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="where to; default RUN/trace.perfetto.json")
    ] = None,
) -> None:
    """Write the trace of a run, real or simulated, for ui.perfetto.dev and chrome://tracing."""
    from headway import run

    print(run.export(run_folder, perfetto))


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(("objective",)), options_metavar="[NAME] [--KEY VALUE ...]")
def objectives(context: typer.Context) -> None:
    """List the objectives, or tell all of one.

    The settings of section objective may be given: headway objectives grpo --corrections tis --clip-high 0.28
    """
    from headway.objectives import describe
    from headway.run import named_objective

    words = _words(context)
    if not words:
        print(describe.overview())
        return
    if words[0].startswith("--"):
        raise UserError(f"which objective? headway objectives NAME {words[0]} ...; without a name they are listed")
    resolved = settings.resolve(None, ["--objective.name", *words])
    settings.only(resolved.origins, ("objective",), "headway objectives")
    print(describe.description(named_objective(resolved.config)))


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(planned.LOOKED_AT), options_metavar="[RECIPE] [OPTIONS]")
def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="a known model, as qwen2.5-7b, or a folder with its config.json")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="as h100, a100-40-sxm, h200, b200, mi300x, rtx-4090")] = None,
    num_gpus: Annotated[str | None, typer.Option(metavar="N", help="of that kind; default 1")] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="grpo|ppo", help="ppo has critic, reference and reward model; default grpo")
    ] = None,
    kl: Annotated[bool, typer.Option("--kl", help="a KL term, and so a frozen reference")] = False,
    lora_rank: Annotated[str | None, typer.Option(metavar="R", help="train an adapter on every linear layer")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(metavar="N", help="of a prompt; default 512")] = None,
    mean_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="of an answer; default a quarter of the longest")
    ] = None,
    longest: Annotated[str | None, typer.Option(metavar="N", help="tokens of an answer; default 4096")] = None,
    nominal: Annotated[
        str | None, typer.Option(metavar="P", help="reckon with a round number of parameters, as 7e9")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="|".join(PRECISIONS), help="of the trainer; default mixed")
    ] = None,
    zero: Annotated[str | None, typer.Option(metavar="0..3", help="what ZeRO divides; default 3, as FSDP does")] = None,
    tensor: Annotated[str | None, typer.Option(metavar="N", help="GPUs of the trainer that share a layer")] = None,
    pipeline: Annotated[str | None, typer.Option(metavar="N", help="stages of the trainer's layers")] = None,
    expert: Annotated[str | None, typer.Option(metavar="N", help="data ranks that share a mixture's experts")] = None,
    engine_tensor: Annotated[
        str | None, typer.Option(metavar="N", help="GPUs of an engine; default all sizes that fit are tried")
    ] = None,
    whole_logits: Annotated[bool, typer.Option("--whole-logits", help="logits of a micro-batch all at once")] = False,
    no_checkpointing: Annotated[bool, typer.Option("--no-checkpointing", help="keep every activation")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="optimizer states wait in the host's memory")] = False,
    usable: Annotated[str | None, typer.Option(metavar="SHARE", help="of a GPU's memory; default 0.9")] = None,
    sleep: Annotated[
        str | None,
        typer.Option(
            metavar="none|cache|weights",
            help="what a colocated engine gives back while the trainer trains; default all",
        ),
    ] = None,
    price: Annotated[str | None, typer.Option(help="of one GPU for an hour, in whatever currency")] = None,
    bandwidth_efficiency: Annotated[str | None, typer.Option(metavar="SHARE", help="default 0.8")] = None,
    prefill_efficiency: Annotated[str | None, typer.Option(metavar="SHARE", help="default 0.5")] = None,
    training_efficiency: Annotated[str | None, typer.Option(metavar="SHARE", help="default 0.4")] = None,
    link_efficiency: Annotated[str | None, typer.Option(metavar="SHARE", help="default 0.8")] = None,
    step_overhead: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="of a decode step; default 0.002")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="take the pace that this run had; may be given several times"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="choose by closed laws, and simulate no schedule")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print all figures as one JSON object")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="write the recommended schedule as a recipe")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="write a page with pictures")] = None,
) -> None:
    """Say before a run whether it fits, how fast it will be, and which schedule to choose.

    The sizes of batches and answers are those of RECIPE or of the settings below; what nobody says is assumed and
    listed. Without --gpu it is the run in one process on this machine, and RECIPE may be the folder of a run that is
    over: then what it took stands beside what is planned.
    """
    recipe, overrides = _recipe_first(_words(context))
    efficiency = {
        "bandwidth": bandwidth_efficiency,
        "prefill": prefill_efficiency,
        "training": training_efficiency,
        "link": link_efficiency,
        "step_overhead_s": step_overhead,
    }
    options = planned.Options(
        gpu=gpu,
        num_gpus=num_gpus,
        algorithm=algorithm,
        kl=kl,
        lora_rank=lora_rank,
        nominal=nominal,
        precision=precision,
        zero=zero,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        engine_tensor=engine_tensor,
        usable=usable,
        price=price,
        sleep=sleep,
        prompt_tokens=prompt_tokens,
        mean_tokens=mean_tokens,
        longest=longest,
        whole_logits=whole_logits,
        no_checkpointing=no_checkpointing,
        offload=offload,
        efficiency={name: value for name, value in efficiency.items() if value is not None},
    )
    _check_file("--write", write)
    _check_file("--page", page)
    if page and page == write:
        raise UserError(f"--page and --write are both {page}; give them different names")
    if gpu is None and (recipe or model is None):
        found = _planned_here(context, options, model, recipe, overrides, calibrate or [])
        _show_here(found, write, page, as_json=as_json)
    else:
        asked = planned.request(options, model, recipe, overrides, calibrate or [])
        _plan(asked, write, page, quick=quick, as_json=as_json)


def _planned_here(
    context: typer.Context,
    options: planned.Options,
    model: str | None,
    recipe: Path | None,
    overrides: list[str],
    calibrate: list[Path],
) -> HerePlan:
    from headway.planning import here
    from headway.reports.sweep_table import progress

    for name in _OF_GPUS:
        if context.params[name] not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} is for a plan on GPUs: leave it out, or name them by --gpu")
    return here.plan(recipe, options, model, overrides, calibrate, progress)


def _show_here(found: HerePlan, write: Path | None, page: Path | None, *, as_json: bool) -> None:
    from headway.reports import here_table

    if as_json:
        print(json.dumps(here_table.to_json(found), allow_nan=False))
    else:
        here_table.show(found, sys.stdout)
    if write:
        from headway.planning.recipe import of_process

        if found.chosen is None:
            raise UserError(
                f"--write {write}: without --calibrate RUN no schedule was simulated, nor is one recommended"
            )
        write.write_text(of_process(found, found.chosen), encoding="utf-8")
        _say_where("recipe", write, as_json=as_json)
    if page:
        from headway.reports import here_page

        here_page.write(page, found)
        _say_where("page", page, as_json=as_json)


def _say_where(what: str, path: Path, *, as_json: bool) -> None:
    print(f"{what}: {path}", file=sys.stderr if as_json else sys.stdout)


_OF_GPUS = (
    *("num_gpus", "algorithm", "kl", "lora_rank", "nominal", "precision", "zero", "tensor", "pipeline", "expert"),
    *("engine_tensor", "whole_logits", "no_checkpointing", "offload", "usable", "sleep", "price", "quick"),
    *("bandwidth_efficiency", "prefill_efficiency", "training_efficiency", "link_efficiency", "step_overhead"),
)
"""Options of `headway plan` that do nothing for a run in one process, whose recipe says all of it."""


def _plan(asked: planned.Request, write: Path | None, page: Path | None, *, quick: bool, as_json: bool) -> None:
    from headway.planning import choose
    from headway.reports import plan_table
    from headway.reports.sweep_table import progress

    found = choose.plan(asked, progress, quick=quick)
    if as_json:
        print(json.dumps(plan_table.to_json(found), allow_nan=False))
    else:
        plan_table.show(found, sys.stdout)
    if write:
        from headway.planning.recipe import of_candidate

        if found.chosen is None:
            raise UserError(f"--write {write}: nothing fits, so there is no schedule to write")
        write.write_text(of_candidate(found.request, found.chosen), encoding="utf-8")
        _say_where("recipe", write, as_json=as_json)
    if page:
        from headway.reports import plan_page

        plan_page.write(page, found, choose.chosen_timeline(found))
        _say_where("page", page, as_json=as_json)


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(PROBED), options_metavar="[OPTIONS]")
def mismatch(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="as model.path of a recipe")] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="model, weights, sampling and prompts of a run, finished or not"),
    ] = None,
    engine_dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16", help="of your engine's weights")
    ] = None,
    head_dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16", help="of your engine's LM head; Headway's is float32")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="int8|int4|fp8", help="how your engine's weights are quantised")
    ] = None,
    version_lag: Annotated[
        str | None, typer.Option(metavar="N", help="train steps that your engine's weights are behind")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="as data.source; default a few questions")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N", help="answers sampled together; default 16, and 128 of a tiny model")
    ] = None,
    new_tokens: Annotated[str | None, typer.Option(metavar="N", help="of an answer at most; default 32")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE.json", help="write all figures")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="write a page with pictures")] = None,
) -> None:
    """Say where an engine's probabilities differ from the trainer's: one source at a time, and what cures it.

    What your own engine does is said by options, or read from a run; the other sources are tried too, at usual values.
    """
    keys = {
        "model": model,
        "prompts": prompts,
        "batch": batch,
        "new-tokens": new_tokens,
        "engine-dtype": engine_dtype,
    }
    asked = request(Options(run, keys, head_dtype, quantize, version_lag), _words(context))
    _check_file("--json", json_file)
    _check_file("--page", page)
    _probe(asked, json_file, page)


def _probe(asked: Request, json_file: Path | None, page: Path | None) -> None:
    from headway.reports import mismatch_page, mismatch_table

    with mismatch_table.progress() as say:
        say("importing torch and transformers", 0, 1)
        from headway.mismatch.probe import probe

        probed = probe(asked, say)
    mismatch_table.show(probed, sys.stdout)
    if json_file:
        json_file.write_text(json.dumps(probed.to_json(), allow_nan=False, indent=2) + "\n", encoding="utf-8")
    if page:
        mismatch_page.write(page, probed)
        print(f"page: {page}")


@app.command(context_settings=_OVERRIDES, options_metavar="METRICS ... [OPTIONS]")
def fit(
    context: typer.Context,
    x: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="what compute is: trained_tokens (default), seconds or steps; or a column"),
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="the reward: a metric or a column; default greedy_accuracy, or reward_mean where evaluations are few",
        ),
    ] = None,
    skip: Annotated[
        str | None, typer.Option(metavar="C", help="leave out the early part, below that compute, or a share as in 10%")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="C", help="fit up to there, and see how the extrapolation came out on the rest"),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="C", help="extrapolate to there; may be given again; default 200%, 1000%"),
    ] = None,
    start: Annotated[str | None, typer.Option(metavar="R", help="R_0, the reward at compute 0; default fitted")] = None,
    ceiling: Annotated[
        str | None, typer.Option(metavar="R", help="no reward can be above it; default 1 of greedy_accuracy, else none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as one JSON object")] = False,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="write a page with the curves")] = None,
) -> None:
    """Fit the ScaleRL sigmoid to learning curves, foretell where they lead, and compare them.

    METRICS are folders of runs, their metrics.jsonl, or tables: CSV or JSON lines with the columns compute and reward.
    """
    paths = [Path(word) for word in _words(context)]
    if wrong := next((path for path in paths if str(path).startswith("-")), None):
        raise UserError(f"unknown option {wrong}; headway fit --help lists what there is")
    if not paths:
        raise UserError("which learning curve? headway fit RUN, or a table as in headway fit curve.csv")
    _check_file("--page", page)
    from headway.scaling import amount
    from headway.scaling.fit import Asked

    asked = Asked(
        skip=amount.parse_amount("--skip", skip) if skip is not None else None,
        until=amount.parse_amount("--until", until) if until is not None else None,
        at=[amount.parse_amount("--at", word) for word in at or []],
        start=amount.parse_number("--start", start, "the reward at compute 0") if start is not None else None,
        ceiling=amount.parse_number("--ceiling", ceiling, "a reward that none can exceed")
        if ceiling is not None
        else None,
    )
    _fit(paths, (x, y), asked, page, as_json=as_json)


def _fit(
    paths: list[Path], axes: tuple[str | None, str | None], asked: Asked, page: Path | None, *, as_json: bool
) -> None:
    from headway.reports import scaling_table
    from headway.scaling import compare, learning_curve
    from headway.scaling.fit import fit as fit_curve

    fits = [fit_curve(curve, asked) for curve in learning_curve.read(paths, *axes)]
    comparisons = compare.compare(fits)
    if as_json:
        figures = {"fits": fits, "comparisons": comparisons}
        print(json.dumps({name: [one.to_json() for one in found] for name, found in figures.items()}, allow_nan=False))
    else:
        scaling_table.show(fits, comparisons, sys.stdout)
    if page:
        from headway.reports import scaling_page

        scaling_page.write(page, fits, comparisons)
        print(f"page: {page}", file=sys.stderr if as_json else sys.stdout)


def main() -> None:
    """Run a command; an error the user can mend is one line on standard error and exit status 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail(str(error))
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that was taken away
        what = f"{error.filename} can't be used" if error.filename else "writing failed"
        _fail(f"{what}: {error.strerror or error}; what was written before stays")


def _fail(message: str) -> NoReturn:
    print(f"headway: {message}", file=sys.stderr)
    sys.exit(2)
