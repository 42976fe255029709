"""The commands: train, simulate, report, objectives."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from headway import config as settings
from headway.types import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def _keys_help(sections: tuple[str, ...] | None = None) -> str:
    """Every key with its type, default and meaning, for the end of a command's help."""
    lines = [
        "Any setting may be given as --section.key VALUE, or --key VALUE where that is unambiguous; words are "
        "separated by commas:"
    ]
    for key, info in settings.fields():
        if sections is None or key.split(".")[0] in sections:
            default = info.get_default(call_default_factory=True)
            meaning = f" {info.description}" if info.description else ""
            shown = "" if default in (None, (), {}) else f", default {default}"
            lines.append(f"--{key.replace('_', '-')} ({settings.choices(info.annotation)}{shown}){meaning}")
    return "\n\n".join(lines)


_SIMULATED = ("run", "generate", "schedule", "evaluate", "simulate")


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
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as one JSON object")] = False,
) -> None:
    """Run the schedule on virtual time."""
    from headway import run
    from headway.reports import summary, text_timeline

    resolved = settings.resolve(*_recipe_first(context.args))
    _only(resolved, _SIMULATED, "headway simulate")
    events = run.simulate(resolved.config)
    figures = summary.summarise(events)
    if timeline:
        print(text_timeline.render(summary.timeline(events)))
    if as_json:
        print(json.dumps(figures, allow_nan=False))
    else:
        print(summary_line(figures))


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(), options_metavar="RECIPE [OPTIONS]")
def train(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would run, and run nothing")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="go on with the run in this folder")] = None,
) -> None:
    """Train a policy by reinforcement learning, as a recipe says."""
    from headway import run
    from headway.reports.folder import choose_folder

    recipe, overrides = _recipe_first(context.args)
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
    print(run.report(folder))


def _only(resolved: settings.Resolved, sections: tuple[str, ...], command: str) -> None:
    """A command refuses the settings that it would not look at."""
    for key, origin in resolved.origins.items():
        if origin == "command line" and key.split(".")[0] not in sections:
            raise UserError(f"--{key} does nothing in {command}, which looks at {', '.join(sections)}; leave it out")


def _some_recipe() -> str:
    return str(next(iter(sorted(Path("recipes").glob("*.toml"))), "recipes/quickstart.toml"))


@app.command()
def report(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]) -> None:
    """Write the page of a run, finished or not."""
    from headway import run

    print(run.report(run_folder))


@app.command(context_settings=_OVERRIDES, epilog=_keys_help(("objective",)), options_metavar="[NAME] [--KEY VALUE ...]")
def objectives(context: typer.Context) -> None:
    """List the objectives, or tell all of one.

    The settings of section objective may be given: headway objectives grpo --corrections tis --clip-high 0.28
    """
    from headway.objectives import describe
    from headway.run import named_objective

    words = list(context.args)
    if not words:
        print(describe.overview())
        return
    if words[0].startswith("--"):
        raise UserError(f"which objective? headway objectives NAME {words[0]} ...; without a name they are listed")
    resolved = settings.resolve(None, ["--objective.name", *words])
    _only(resolved, ("objective",), "headway objectives")
    print(describe.description(named_objective(resolved.config)))


def summary_line(figures: dict[str, Any]) -> str:
    return (
        f"total {figures['total']:g}  lane utilisation {figures['lane_utilization']:.1%}  "
        f"trainer utilisation {figures['trainer_utilization']:.1%}  throughput {figures['throughput']:.4g}  "
        f"lag mean {figures['mean_lag']:.3g} max {figures['max_lag']}"
    )


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
