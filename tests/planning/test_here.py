"""The plan of a run in one process: that a run which went at a known pace is foretold, and what is said and refused."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headway.cli import app
from headway.config import resolve
from headway.plan.in_process import InProcessJob
from headway.plan.lengths import Answers
from headway.plan.states import Models
from headway.planning import here
from headway.planning.here import train_step_s
from headway.planning.pace import measured, pace
from headway.planning.request import Options
from headway.types import UserError
from tests.planning import recorded as known
from tests.planning.recorded import recorded

ROOFLINE = (
    "--simulate.engine roofline --simulate.weight-bytes 1 --simulate.kv-bytes-per-token 0 "
    "--simulate.bandwidth-bytes-per-s 1e9 --simulate.lengths lognormal:0.5 --simulate.longest 16 "
    f"--simulate.overhead-s {known.PASS_S} --simulate.rollout-s {known.ROW_S} "
    "--generate.max-new-tokens 16 --schedule.batch-size 32 --generate.lanes 32"
).split()


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def planned(source, *calibrate, overrides=()):
    return here.plan(source, Options(), None, overrides, calibrate)


def test_the_time_of_a_train_step_by_hand(tmp_path):
    """32 answers of 12 tokens and 4 prompts of 50: 584 tokens, three passes each, and one optimizer step."""
    found = pace([measured(recorded(tmp_path / "run"))])
    config = resolve(None, [f"--model.path={known.MODEL}", "--objective.name=reinforce"]).config
    job = InProcessJob(known.SHAPE, Models(), Answers.of(50, [12.0], 12), 32, 32, 8, 1280, 1e12)
    pairs = 32 * (12 * 50 + 72) + 4 * 1250
    flops = 3 * (2 * 134_515_008 * 584 + known.SHAPE.attention_flops(1) * pairs)
    expected = flops / known.RATE + known.UPDATE_S + 584 * known.REST_S
    assert train_step_s(config, job, found) == pytest.approx(expected)


@pytest.mark.parametrize("slowdown", [1.0, 1.6])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_run_at_a_known_pace_is_foretold(tmp_path, run_ahead, slowdown):
    """What was measured is a simulation at that pace, so the plan of the same run comes to the same step."""
    shared = [f"--simulate.{who}-slowdown={slowdown}" for who in ("engine", "trainer")]
    ahead = f"--schedule.run-ahead={run_ahead}"
    folder = recorded(tmp_path / "run", *ROOFLINE, *shared, ahead, steps=40, slowdown=slowdown)
    found = planned(folder, folder)
    assert found.beside is not None
    assert found.own is not None
    assert found.own.run_ahead == run_ahead
    assert found.own.step_s == pytest.approx(found.beside.step_s, rel=0.08)
    assert found.beside.peak_bytes == 6.4e9


def test_an_evaluation_in_a_step_leaves_it_out(tmp_path):
    folder = recorded(tmp_path / "run", *ROOFLINE, "--evaluate.size", "8", "--evaluate.every", "5", steps=12)
    found = planned(folder)
    assert found.beside is not None
    assert 1 <= found.beside.num_steps < 11


def test_of_schedules_that_are_as_fast_the_one_with_the_least_lag_is_recommended(tmp_path):
    folder = recorded(tmp_path / "run", *ROOFLINE, slowdown=2.0)
    found = planned(folder, folder)
    assert [schedule.run_ahead for schedule in found.schedules] == [0, 1, 2]
    assert found.chosen is not None
    best = max(schedule.tokens_per_s for schedule in found.schedules)
    assert found.chosen.tokens_per_s >= 0.98 * best
    as_fast = [schedule for schedule in found.schedules if schedule.tokens_per_s >= 0.98 * best]
    assert found.chosen.token_lag == min(schedule.token_lag for schedule in as_fast)


def test_a_recipe_is_planned_without_a_run(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{known.MODEL}"\n[generate]\nmax_new_tokens = 16\nlanes = 8\n')
    result = run(recipe)
    assert result.exit_code == 0, result.output
    assert "generated and trained in one process" in " ".join(result.output.split())
    assert "once a run of the same model is measured" in result.output
    assert "engine's weights, laid out" in result.output


def test_predicted_stands_beside_measured_and_on_a_page(tmp_path):
    folder, page = recorded(tmp_path / "run", *ROOFLINE), tmp_path / "plan.html"
    result = run(folder, "--calibrate", folder, "--page", page)
    assert result.exit_code == 0, result.output
    for words in ("predicted", "measured", "ratio", "the recipe's", "an optimizer step"):
        assert words in result.output
    text = page.read_text()
    for words in ("What the process holds", "A pass of the engine", "A train step, by run_ahead", "What the run took"):
        assert words in text
    said = json.loads(run(folder, "--calibrate", folder, "--json").stdout)
    assert said["measured"]["peak_bytes"] == 6.4e9
    assert said["predicted_step_s"] > 0
    assert said["pace"]["pass_s"] == pytest.approx(known.PASS_S)


def test_the_recommended_schedule_is_written_as_a_recipe(tmp_path):
    """Which `headway simulate` plays, and which keeps whatever else the recipe says."""
    folder, written = recorded(tmp_path / "run", *ROOFLINE, "--run.name=mine"), tmp_path / "planned.toml"
    assert run(folder, "--calibrate", folder, "--write", written).exit_code == 0
    config = resolve(written).config
    assert config.run.name == "mine"
    assert config.run.out is None
    assert config.simulate.overhead_s == pytest.approx(known.PASS_S)
    assert config.schedule.run_ahead == planned(folder, folder).chosen.run_ahead
    refused = run(folder, "--write", tmp_path / "no.toml")
    assert "without --calibrate RUN no schedule was simulated" in str(refused.exception)


def test_another_model_or_adapter_is_refused(tmp_path):
    folder = recorded(tmp_path / "run", *ROOFLINE)
    for overrides, said in (
        (["--model.path=qwen2.5-0.5b"], r"has model\.path smollm2-135m, and what is planned has qwen2\.5-0\.5b"),
        (["--adapter.kind=lora", "--adapter.rank=8"], r"has adapter\.kind none, and what is planned has lora"),
        (["--generate.dtype=bfloat16"], r"has generate\.dtype float32, and what is planned has bfloat16"),
        (["--run.threads=1"], r"has run\.threads None, and what is planned has 1"),
    ):
        with pytest.raises(UserError, match=said):
            planned(folder, folder, overrides=overrides)


def test_a_recipe_has_the_lengths_of_the_run_it_is_calibrated_on(tmp_path):
    """Unless somebody says others; without a run what was assumed is part of the verdict."""
    folder, recipe = recorded(tmp_path / "run", *ROOFLINE), tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{known.MODEL}"\n[generate]\nmax_new_tokens = 16\nlanes = 32\n'
        "[schedule]\nbatch_size = 32\ngroup_size = 8\n"
    )
    of_run, of_recipe = planned(folder, folder), planned(recipe, folder)
    assert of_recipe.job.answers.mean == pytest.approx(of_run.job.answers.mean, rel=0.02)
    assert of_recipe.own.step_s == pytest.approx(of_run.own.step_s, rel=0.1)
    origins = {item.name: item.origin for item in of_recipe.assumptions}
    assert origins["simulate.lengths"] == f"as in {folder}"
    longer = here.plan(recipe, Options(mean_tokens="3"), None, [], [folder])
    assert longer.job.answers.mean == pytest.approx(3, rel=0.2)
    alone = run(recipe).output
    assert "prompts of 512 tokens and answers of 4 on average, which nobody said" in " ".join(alone.split())


@pytest.mark.parametrize("words", [["--schedule.overlap=false"], ["--schedule.redundant=4"]])
def test_the_recipes_own_schedule_is_simulated(tmp_path, words):
    folder = recorded(tmp_path / "run", *ROOFLINE, "--schedule.run-ahead=1", slowdown=1.0)
    usual, other = planned(folder, folder), planned(folder, folder, overrides=words)
    assert other.own != usual.own  # a simulation of the same gives the same to the last bit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--zero", "2"], "--zero is for a plan on GPUs"),
        (["--num-gpus", "8"], "--num-gpus is for a plan on GPUs"),
        (["--quick"], "--quick is for a plan on GPUs"),
        (["--calibrate", "nowhere"], "there is no run folder nowhere"),
        (["--report.sinks", "wandb"], "does nothing in headway plan"),
        (["--train.learning-rate", "1e-3"], "does nothing in headway plan"),
        (["--model.device", "cuda"], "a run in one process is planned on a CPU so far"),
        (["--gpu", "h100", "--calibrate", "RUN"], "ran on cpu, which says nothing of a H100 SXM"),
    ],
)
def test_what_does_nothing_or_is_not_there_is_one_line(tmp_path, words, said):
    folder = recorded(tmp_path / "run", *ROOFLINE)
    recipe = folder / "config.toml"
    command = [sys.executable, "-m", "headway", "plan", recipe, *(folder if word == "RUN" else word for word in words)]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_nothing_heavy_is_imported_for_a_plan_without_a_run(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{known.MODEL}"\n')
    program = (
        "import sys; from typer.testing import CliRunner; from headway.cli import app; "
        f"assert CliRunner().invoke(app, ['plan', {str(recipe)!r}]).exit_code == 0; "
        "print([name for name in ('torch', 'numpy', 'scipy', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
