"""What verl's own loss, advantage and correction functions give on small fixed inputs: `tests/golden/verl.json`.

verl is no dependency. It lives in an environment of its own, whose python runs this file:

    python -m venv verl-env
    verl-env/bin/pip install --no-deps verl==0.9.1
    verl-env/bin/pip install torch codetiming omegaconf ray "tensordict<=0.10" "transformers>=5.5.3,<5.11"

    verl-env/bin/python benchmarks/against_verl.py record

`verl_inputs.py` has the inputs, `verl_settings.py` what the functions are called with. What Headway gives on the same
stands beside it in `docs/verl.md`, by `tests/golden/`.

The recorded file names verl's version, the inputs, and for every call its settings and what it returned; for a loss
also the gradient with respect to what it is a loss of. Inputs and outputs are ragged: a list per rollout, without
padding; verl is given them padded with zeros to `width`, in float64, with a mask of float64, so that what differs is a
convention and no rounding. Where verl computes in float32 whatever it is given, the case says `"float32": true`. The
1e-8 in verl's denominators, which float32 swallows, shows here: as 5e-9 of a mean over two tokens. Some of the metrics
are counted in float32.

Axes: R rollouts, T padded positions, N tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl_inputs import Batch, batches, rounded
from verl_settings import (
    AGGREGATIONS,
    BYPASSES,
    GAMMA_AND_LAMBDA,
    MISMATCHED,
    NO_DUAL_CLIP,
    OF_A_LARGER_BATCH,
    OUTCOME_ADVANTAGES,
    POLICY_LOSSES,
    REJECTIONS,
    TOKEN_TIS,
    WEIGHTS,
    WEIGHTS_PER_TOKEN,
)

OUT = Path("tests/golden/verl.json")

Case = dict[str, Any]


def import_verl() -> SimpleNamespace:
    """The modules used below; here and not above, so that reading this file needs no verl."""
    import verl
    import verl.trainer.config
    import verl.trainer.ppo.core_algos
    import verl.trainer.ppo.rollout_corr_helper
    import verl.utils.torch_functional
    import verl.workers.config

    return SimpleNamespace(
        version=verl.__version__,
        algos=verl.trainer.ppo.core_algos,
        correction=verl.trainer.ppo.rollout_corr_helper,
        masked=verl.utils.torch_functional,
        config=verl.trainer.config,
        workers=verl.workers.config,
    )


# Advantages


def advantage_case(verl: SimpleNamespace, batch: Batch, name: str, settings: dict, arguments: dict) -> Case:
    estimate = verl.algos.get_adv_estimator_fn(name)
    advantages_RT, returns_RT = estimate(response_mask=batch.mask_RT, **arguments)
    outputs = {"advantages": batch.ragged(advantages_RT)}
    if returns_RT is not advantages_RT:
        outputs["returns"] = batch.ragged(returns_RT)
    if name in ("grpo_vectorized", "gdpo", "gpg"):
        outputs["float32"] = True
    return case("advantage", name, estimate, batch, settings, outputs)


def advantage_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for batch in (batches["plain"], batches["masked"], batches["worked_rewards"]):
        for name, settings in OUTCOME_ADVANTAGES:
            # The reward is handed over anew: these estimators may write into the sums that they make of it.
            arguments = {"token_level_rewards": batch.last_token_reward(), "index": batch.fields["group"]}
            yield advantage_case(verl, batch, name, settings, {**arguments, **settings})
    for batch in (batches["plain"], batches["masked"]):
        yield from token_advantage_cases(verl, batch)
        yield gdpo_case(verl, batch)
    yield from best_of_group_cases(verl, batches["plain"])
    yield gae_case(verl, batches["worked_gae"], 1.0, 0.95)
    yield gae_case(verl, batches["worked_gae"], 1.0, 1.0)


def token_advantage_cases(verl: SimpleNamespace, batch: Batch) -> Iterator[Case]:
    reward_RT = batch.tensor("token_reward")
    for gamma, lam in GAMMA_AND_LAMBDA:
        yield gae_case(verl, batch, gamma, lam)
    for gamma in (1.0, 0.9):
        arguments = {"token_level_rewards": reward_RT, "config": verl.config.AlgoConfig(gamma=gamma)}
        yield advantage_case(verl, batch, "reinforce_plus_plus", {"gamma": gamma}, arguments)
    arguments = {"token_level_rewards": reward_RT, "reward_baselines": batch.tensor("greedy_reward")}
    yield advantage_case(verl, batch, "remax", {}, arguments)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        yield optimal_baseline_case(verl, batch, name, corrected=False)
        yield optimal_baseline_case(verl, batch, name, corrected=True)


def gae_case(verl: SimpleNamespace, batch: Batch, gamma: float, lam: float) -> Case:
    settings = {"gamma": gamma, "lam": lam}
    arguments = {"token_level_rewards": batch.tensor("token_reward"), "values": batch.tensor("old_value")}
    return advantage_case(verl, batch, "gae", settings, {**arguments, **settings})


def optimal_baseline_case(verl: SimpleNamespace, batch: Batch, name: str, corrected: bool) -> Case:
    settings = {"weights": TOKEN_TIS} if corrected else {}
    weights_RT, _ = corrections(verl, batch, settings)
    arguments = {
        "token_level_rewards": batch.tensor("token_reward"),
        "index": batch.fields["group"],
        "old_log_probs": batch.tensor("old"),
        "sum_pi_squared": batch.tensor("sum_pi_squared"),
        "rollout_is_weights": weights_RT,
    }
    return advantage_case(verl, batch, name, settings, arguments)


def gdpo_case(verl: SimpleNamespace, batch: Batch) -> Case:
    settings = {"gdpo_reward_keys": ["reward", "second_reward"], "gdpo_reward_weights": [1.0, 0.5]}
    attention = [[1] * (1 + length) + [0] * (batch.width - length) for length in batch.lengths]
    arguments = {
        "token_level_rewards": batch.last_token_reward(),
        "index": batch.fields["group"],
        "config": verl.config.AlgoConfig(**settings),
        "non_tensor_batch": {key: batch.fields[key] for key in settings["gdpo_reward_keys"]},
        "batch": {"prompts": torch.zeros(len(attention), 1), "attention_mask": torch.tensor(attention)},
    }
    return advantage_case(verl, batch, "gdpo", settings, arguments)


def best_of_group_cases(verl: SimpleNamespace, batch: Batch) -> Iterator[Case]:
    for normalise in (True, False):
        settings = {"norm_adv_by_std_in_grpo": normalise}
        arguments = {
            "token_level_rewards": batch.last_token_reward(),
            "index": batch.fields["group"],
            "config": verl.config.AlgoConfig(**settings),
        }
        yield advantage_case(verl, batch, "grpo_passk", settings, arguments)


def reward_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for batch in (batches["plain"], batches["masked"]):
        reward_RT = verl.algos.compute_rewards(
            batch.last_token_reward(), batch.tensor("old"), batch.tensor("ref"), kl_ratio=0.1
        )
        settings = {"kl_ratio": 0.1}
        outputs = {"rewards": batch.ragged(reward_RT)}
        yield case("reward", "kl_in_reward", verl.algos.compute_rewards, batch, settings, outputs)


# Whitening and other masked statistics


def statistics_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for batch in (batches["plain"], batches["masked"]):
        value_RT, mask_RT = batch.tensor("token_advantage"), batch.mask_RT
        for shift_mean in (True, False):
            white_RT = verl.masked.masked_whiten(value_RT, mask_RT, shift_mean=shift_mean)
            outputs = {"value": batch.ragged(white_RT)}
            yield case("statistics", "whiten", verl.masked.masked_whiten, batch, {"shift_mean": shift_mean}, outputs)
        for unbiased in (True, False):
            variance = verl.masked.masked_var(value_RT, mask_RT, unbiased=unbiased)
            outputs = {"value": rounded(variance.item())}
            yield case("statistics", "variance", verl.masked.masked_var, batch, {"unbiased": unbiased}, outputs)
        mean = verl.masked.masked_mean(value_RT, mask_RT)
        yield case("statistics", "mean", verl.masked.masked_mean, batch, {}, {"value": rounded(mean.item())})


def entropy_cases(verl: SimpleNamespace) -> Iterator[Case]:
    logits = [[0.0, 0.0, 0.0], [2.0, -1.0, 0.5], [30.0, 0.0, -30.0]]
    entropy_N = verl.masked.entropy_from_logits(torch.tensor(logits, dtype=torch.float64))
    outputs = {"value": [rounded(item) for item in entropy_N.tolist()]}
    yield case("statistics", "entropy", verl.masked.entropy_from_logits, None, {"logits": logits}, outputs)


# Aggregations


def aggregation_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for batch in (batches["plain"], batches["masked"], batches["worked_aggregation"]):
        for settings in AGGREGATIONS:
            yield aggregation_case(verl, batch, settings)
    for settings in AGGREGATIONS:
        yield aggregation_case(verl, batches["masked"], {**settings, **OF_A_LARGER_BATCH})


def aggregation_case(verl: SimpleNamespace, batch: Batch, settings: dict) -> Case:
    loss_RT = batch.tensor("loss").requires_grad_()
    loss = verl.algos.agg_loss(loss_RT, batch.mask_RT, **settings)
    name = settings["loss_agg_mode"]
    return case("aggregation", name, verl.algos.agg_loss, batch, settings, loss_and_gradient(batch, loss, loss_RT))


# Policy losses


def policy_loss_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for name, names, settings in POLICY_LOSSES:
        for batch in names:
            yield policy_loss_case(verl, batches[batch], name, {"loss_agg_mode": "token-mean", **settings})
    for correction in BYPASSES:
        settings = {"loss_agg_mode": "token-mean", **NO_DUAL_CLIP, "policy_loss": {"rollout_correction": correction}}
        yield policy_loss_case(verl, batches["plain"], "bypass_mode", settings)


def policy_loss_case(verl: SimpleNamespace, batch: Batch, name: str, settings: dict) -> Case:
    compute = verl.algos.get_policy_loss_fn(name)
    weights_RT, mask_RT = corrections(verl, batch, settings)
    logp_RT = batch.tensor("logp").requires_grad_()
    loss, metrics = compute(
        old_log_prob=batch.tensor("rollout" if name == "bypass_mode" else "old"),
        log_prob=logp_RT,
        advantages=batch.per_token(settings.get("advantage", "advantage")),
        response_mask=mask_RT,
        loss_agg_mode=settings["loss_agg_mode"],
        config=actor_config(verl, name, settings),
        rollout_is_weights=weights_RT,
    )
    actor = {key.removeprefix("actor/"): rounded(value) for key, value in metrics.items() if key.startswith("actor/")}
    outputs = {**loss_and_gradient(batch, loss, logp_RT), **({"metrics": actor} if actor else {})}
    return case("policy_loss", name, compute, batch, settings, outputs)


def actor_config(verl: SimpleNamespace, name: str, settings: dict) -> Any:
    policy = dict(settings.get("policy_loss", {}))
    if "rollout_correction" in policy:
        policy["rollout_correction"] = verl.config.RolloutCorrectionConfig(**policy["rollout_correction"])
    policy_loss = verl.workers.PolicyLossConfig(loss_mode=name, **policy)
    own = {key: settings[key] for key in settings if key.startswith(("clip_ratio", "tau_"))}
    batch_info = {key: settings[key] for key in (*OF_A_LARGER_BATCH, "loss_scale_factor") if key in settings}
    return verl.workers.ActorConfig(
        strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, policy_loss=policy_loss, global_batch_info=batch_info, **own
    )


def corrections(verl: SimpleNamespace, batch: Batch, settings: dict) -> tuple[Tensor | None, Tensor]:
    """Weights, if the settings ask for them, and the mask that is left after rejection."""
    weights_RT, mask_RT = None, batch.mask_RT
    if "weights" in settings:
        weights_RT, _ = verl.correction.compute_rollout_correction_weights(
            log_ratio_of(batch), batch.mask_RT, **settings["weights"]
        )
    if "rejection" in settings:
        mask_RT, _ = verl.correction.compute_rollout_rejection_mask(
            log_ratio_of(batch), batch.mask_RT, **settings["rejection"]
        )
    return weights_RT, mask_RT


def log_ratio_of(batch: Batch) -> Tensor:
    return batch.tensor("old") - batch.tensor("rollout")


# Value loss and KL


def value_loss_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    for batch in (batches["plain"], batches["masked"]):
        for cliprange in (0.2, 0.5, 1e9):
            for mode in ("token-mean", "seq-mean-token-mean"):
                yield value_loss_case(verl, batch, {"cliprange_value": cliprange, "loss_agg_mode": mode})


def value_loss_case(verl: SimpleNamespace, batch: Batch, settings: dict) -> Case:
    value_RT = batch.tensor("value").requires_grad_()
    compute = verl.algos.compute_value_loss
    loss, clipped = compute(
        vpreds=value_RT,
        returns=batch.tensor("return"),
        values=batch.tensor("old_value"),
        response_mask=batch.mask_RT,
        **settings,
    )
    outputs = {**loss_and_gradient(batch, loss, value_RT), "metrics": {"clipfrac": rounded(clipped.item())}}
    return case("value_loss", "clipped", compute, batch, settings, outputs)


def kl_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    """Other names of verl: kl is k1, mse is k2, low_var_kl is k3."""
    for batch in (batches["plain"], batches["extreme"], batches["worked_kl"]):
        for estimator in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"):
            logp_RT = batch.tensor("logp").requires_grad_()
            kl_RT = verl.algos.kl_penalty(logp_RT, batch.tensor("ref"), estimator)
            (gradient_RT,) = torch.autograd.grad((kl_RT * batch.mask_RT).sum(), logp_RT)
            outputs = {"value": batch.ragged(kl_RT), "gradient": batch.ragged(gradient_RT)}
            yield case("kl", estimator, verl.algos.kl_penalty, batch, {"kl_penalty": estimator}, outputs)


# Corrections of the mismatch between trainer and engine


def weights_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    compute = verl.correction.compute_rollout_correction_weights
    for batch in (batches[name] for name in MISMATCHED):
        # verl divides by zero for its metrics where a band leaves no weight at all, as for the one worked rollout.
        for settings in WEIGHTS if len(batch.lengths) > 1 else WEIGHTS_PER_TOKEN:
            weights_RT, metrics = compute(log_ratio_of(batch), batch.mask_RT, **settings)
            outputs = {"weights": batch.ragged(weights_RT), "metrics": short(metrics, "rollout_is_")}
            name = settings["rollout_is"] + ("_band" if isinstance(settings["rollout_is_threshold"], str) else "")
            yield case("weights", name, compute, batch, settings, outputs)


def rejection_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    compute = verl.correction.compute_rollout_rejection_mask
    for batch in (batches[name] for name in MISMATCHED):
        for settings in REJECTIONS:
            mask_RT, metrics = compute(log_ratio_of(batch), batch.mask_RT, **settings)
            kept = {key: metrics[key] for key in ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")}
            outputs = {"mask": batch.ragged(mask_RT), "metrics": short(kept, "rollout_rs_")}
            yield case("rejection", settings["rollout_rs"], compute, batch, settings, outputs)


def diagnostics_cases(verl: SimpleNamespace, batches: dict[str, Batch]) -> Iterator[Case]:
    compute = verl.correction.compute_offpolicy_metrics
    for batch in (batches[name] for name in MISMATCHED):
        metrics = compute(batch.tensor("old"), batch.tensor("rollout"), batch.mask_RT)
        yield case("diagnostics", "off_policy", compute, batch, {}, {"metrics": short(metrics, "")})


def short(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): rounded(value) for key, value in metrics.items()}


def presets(verl: SimpleNamespace) -> dict[str, dict]:
    """What verl's named corrections stand for: every setting that is on."""
    config = verl.config.RolloutCorrectionConfig
    names = [name for name in vars(config) if name.startswith(("decoupled_", "bypass_")) and name != "bypass_mode"]
    return {
        name: {key: value for key, value in dict(getattr(config, name)()).items() if value not in (None, False, "")}
        for name in names
    }


# The file


def loss_and_gradient(batch: Batch, loss: Tensor, of_RT: Tensor) -> dict[str, Any]:
    (gradient_RT,) = torch.autograd.grad(loss, of_RT)
    padding_RT = torch.tensor([[position >= length for position in range(batch.width)] for length in batch.lengths])
    assert not gradient_RT[padding_RT].any(), f"padding has a gradient in {batch.name}"
    return {"loss": rounded(loss.item()), "gradient": batch.ragged(gradient_RT)}


def case(kind: str, name: str, function: Any, batch: Batch | None, settings: dict, outputs: dict[str, Any]) -> Case:
    inputs = {"inputs": batch.name} if batch else {}
    return {"kind": kind, "name": name, "function": function.__name__, **inputs, "settings": settings, **outputs}


def record(path: Path) -> None:
    verl, named = import_verl(), batches()
    cases = [
        *reward_cases(verl, named),
        *advantage_cases(verl, named),
        *statistics_cases(verl, named),
        *entropy_cases(verl),
        *aggregation_cases(verl, named),
        *policy_loss_cases(verl, named),
        *value_loss_cases(verl, named),
        *kl_cases(verl, named),
        *weights_cases(verl, named),
        *rejection_cases(verl, named),
        *diagnostics_cases(verl, named),
    ]
    inputs = {name: {"width": batch.width, **batch.fields} for name, batch in named.items()}
    path.write_text(layout(verl.version, inputs, presets(verl), cases), encoding="utf-8")
    print(f"{path}: {len(cases)} cases of verl {verl.version}, {path.stat().st_size / 1000:.0f} kB")


def layout(version: str, inputs: dict[str, dict], presets: dict[str, dict], cases: list[Case]) -> str:
    """JSON with a line per batch, preset and case, so that a change shows which it is."""

    def line(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)

    def block(values: dict[str, dict]) -> str:
        return "{\n" + ",\n".join(f"{line(key)}:{line(value)}" for key, value in values.items()) + "\n}"

    listed = ",\n".join(line(item) for item in cases)
    return (
        f'{{"verl":{line(version)},\n"inputs":{block(inputs)},\n"presets":{block(presets)},\n"cases":[\n{listed}\n]}}\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["record"], help="record: call verl's functions and write what they give")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where to write (default: {OUT})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record(arguments.out)


if __name__ == "__main__":
    main()
