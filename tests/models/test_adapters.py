"""Adapters: they start as nothing, are all that is trained and sent, and leave what `peft` and `transformers` load.

The faults of other systems that are ruled out here: an adapter that never reaches the engine, a base that drifts, a
tied head that parts from its embedding, adapters that differ under one seed, a bare base as the reference of a run that
began from an adapter, a served adapter that is too weak or too strong.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.config import AdapterSettings, Train
from headway.generate.torch_engine import TorchEngine
from headway.models import adapters
from headway.models.attention import PackedAttention, Segment
from headway.models.cores import FixedCores
from headway.models.distribution import Shape, logprobs
from headway.models.policy import Policy, add_adapter, load_policy, locate, save_policy
from headway.models.weights import assign_weights, fingerprint
from headway.stages import Sample, SampleRequest
from headway.sync.memory import MemorySync
from headway.train.local import LocalTrainer
from headway.types import Prompt, UserError
from tests import tiny
from tests.tiny import END, make_model, make_policy, make_tokenizer

KINDS = [
    {"kind": "lora", "rank": 1},
    {"kind": "lora", "rank": 3, "alpha": 5, "scaling": "sqrt_rank"},
    {"kind": "lora", "rank": 4, "targets": ["q_proj", "mlp.down_proj"]},
    {"kind": "tinylora", "vector_size": 3},
    {"kind": "tinylora", "rank": 3, "vector_size": 5, "tying": 1.0},
]
every_kind = pytest.mark.parametrize(
    "settings", KINDS, ids=["rank 1", "rslora", "some layers", "tinylora", "tinylora tied"]
)

IDS = tiny.random_ids(9)


def adapted(settings: dict[str, Any], *, seed: int = 0, architecture: str = "llama", **model: Any) -> Policy:
    return add_adapter(make_policy(architecture, **model), AdapterSettings(**settings), seed)


def loaded(folder: Path, settings: dict[str, Any], *, seed: int = 0) -> Policy:
    return load_policy(str(folder), "cpu", AdapterSettings(**settings), seed)


def answers(policy: Policy, ids_T: torch.Tensor = IDS) -> torch.Tensor:
    """Log-probs [T, V] of every next token, through Headway's own forward pass."""
    plan = PackedAttention([Segment(0, len(ids_T))], policy.device)
    return logprobs(policy.head, policy.hidden(ids_T, torch.arange(len(ids_T)), plan), 1.0)


def base_of(policy: Policy) -> str:
    """A hash of every weight of the base, in the model with the adapter or without one."""
    weights = {name.replace(".base_layer", ""): tensor for name, tensor in policy.model.state_dict().items()}
    return fingerprint({name: w for name, w in weights.items() if "lora_" not in name})


def train(policy: Policy, num_steps: int = 3, learning_rate: float = 0.05) -> torch.optim.Optimizer:
    """Makes some tokens likelier, by an optimizer over whatever requires gradients."""
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    for _ in range(num_steps):
        (-answers(policy)[:, 3].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def trained(settings: dict[str, Any], **options: Any) -> Policy:
    policy = adapted(settings, **options)
    train(policy)
    return policy


def refusal(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the start


@every_kind
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_at_the_start_the_policy_is_the_base_bit_for_bit(settings, architecture):
    policy, base = adapted(settings, architecture=architecture), make_policy(architecture)
    assert torch.equal(answers(policy), answers(base))
    train(policy, 1)
    assert not torch.equal(answers(policy), answers(base))


def test_layers_that_keep_their_weights_transposed():
    policy = adapted({"kind": "lora", "rank": 2}, architecture="gpt2")
    assert torch.equal(answers(policy), answers(make_policy("gpt2")))
    train(policy)
    torch.testing.assert_close(answers(policy), answers(as_merged(policy)), atol=1e-5, rtol=0)


def as_merged(policy: Policy) -> Policy:
    """The policy that `save_policy(merge=True)` writes, without a folder between."""
    assert policy.adapter is not None
    model = policy.adapter.merged()
    return Policy(model, type(policy.head).of(model), policy.cache_shapes)


def test_lora_is_scaled_as_it_says():
    """W x + alpha / rank * B (A x), and alpha / sqrt(rank) when rank-stabilised; alpha is 32, and the rank 8, unless
    given."""
    layer_of = {}
    cases = [
        ({}, 32 / 8),
        ({"rank": 1}, 32.0),
        ({"rank": 4, "alpha": 2}, 0.5),
        ({"rank": 4, "alpha": 2, "scaling": "sqrt_rank"}, 1.0),
    ]
    for number, (settings, scale) in enumerate(cases):
        policy = trained({"kind": "lora", **settings})
        layer_of[number] = layer = policy.model.model.layers[1].mlp.up_proj
        x_D = torch.linspace(-1, 1, 32)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(layer(x_D), layer.base_layer.weight @ x_D + scale * (b @ (a @ x_D)))


def test_every_linear_layer_but_the_head_has_one():
    names = adapted({"kind": "lora"}).weights()
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}
    words = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    words += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert layers == {f"model.layers.{number}.{word}" for number in range(2) for word in words}


def test_layers_that_are_chosen():
    names = adapted({"kind": "lora", "targets": ["q_proj", "1.mlp.up_proj"]}).weights()
    assert {name.removeprefix("base_model.model.model.layers.").rpartition(".lora_")[0] for name in names} == {
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("tying", "num_vectors"), [(0.0, 14), (0.5, 7), (1.0, 1)], ids=["own vectors", "half as many", "one for all"]
)
def test_tinylora_trains_so_many_numbers(tying, num_vectors):
    policy = adapted({"kind": "tinylora", "vector_size": 13, "tying": tying})
    assert [tensor.shape for tensor in policy.weights().values()] == [(13,)] * num_vectors


# ---- one seed, one adapter


@every_kind
def test_the_same_seed_is_the_same_adapter_whatever_was_drawn_before(settings):
    one = adapted(settings, seed=7)
    torch.rand(1000)
    other = adapted(settings, seed=7)
    assert fingerprint(one.weights()) == fingerprint(other.weights())
    assert_same_frame(one, other)
    third = adapted(settings, seed=8)
    assert fingerprint(third.weights() | frame(third)) != fingerprint(one.weights() | frame(one))


@every_kind
def test_making_an_adapter_is_not_felt_by_others_who_draw(settings):
    policy = make_policy()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    add_adapter(policy, AdapterSettings(**settings), 0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("seed", [-3, 2**70])
def test_any_whole_number_is_a_seed(seed):
    for kind in ("lora", "tinylora"):
        adapted({"kind": kind}, seed=seed)


def frame(policy: Policy) -> dict[str, torch.Tensor]:
    assert policy.adapter is not None
    return policy.adapter.frame()


def assert_same_frame(one: Policy, other: Policy) -> None:
    assert fingerprint(frame(one)) == fingerprint(frame(other))


# ---- what is trained and sent


@every_kind
def test_only_the_adapter_is_trained_and_sent_in_float32(settings):
    policy = adapted(settings)
    optimizer = train(policy)
    own = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in own)
    weights = policy.weights()
    assert len(own) == len(weights) == len(optimizer.state)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(".lora_A." in name or ".lora_B." in name or ".tinylora_v." in name for name in weights)
    assert all(tensor.any() for name, tensor in weights.items() if "lora_A" not in name), "all of it was trained"


@every_kind
def test_the_base_stays_bit_for_bit_over_many_steps_and_syncs(settings):
    trainer, engine = adapted(settings), adapted(settings)
    start, before = base_of(trainer), answers(engine)
    for _ in range(25):
        train(trainer, 2)
        assign_weights(engine.weights(), trainer.weights())
        with trainer.as_reference():
            assert torch.equal(answers(trainer), before)
    assert base_of(trainer) == base_of(engine) == start
    if settings["kind"] == "lora":
        assert start == base_of(make_policy())
    assert torch.equal(answers(engine), answers(trainer))
    assert (answers(engine) - before).abs().max() > 0.1, "what was sent arrived"


def test_an_adapter_of_other_names_is_refused():
    some, others = adapted({"kind": "lora", "targets": ["q_proj"]}), adapted({"kind": "lora", "targets": ["v_proj"]})
    assert "was sent to a model that has none of that name" in refusal(assign_weights, some.weights(), others.weights())
    assert "was not sent" in refusal(assign_weights, adapted({"kind": "lora"}).weights(), some.weights())
    assert "was sent to a model that has none" in refusal(assign_weights, make_policy().weights(), some.weights())
    two = adapted({"kind": "lora", "targets": ["q_proj"], "rank": 2})
    assert "was sent as [8, 32], the model has [2, 32]" in refusal(assign_weights, two.weights(), some.weights())


@every_kind
def test_tied_weights_stay_tied_and_as_they_were(settings, tmp_path: Path):
    policy = adapted(settings, tie_word_embeddings=True)
    embedding, head = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
    before = embedding.weight.clone()
    train(policy)
    assert embedding.weight is head.weight is policy.head.weight_VD
    assert torch.equal(embedding.weight, before)
    save_policy(policy, make_tokenizer(), tmp_path / "merged", merge=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def test_products_in_bfloat16_leave_an_adapter_in_float32_and_its_reference_the_start():
    policy = adapted({"kind": "lora"})
    products = torch.autocast("cpu", dtype=torch.bfloat16)
    with products:
        before = answers(policy)
    train(policy)
    with products:  # which keeps rounded weights from one forward pass to the next
        after = answers(policy)
        with policy.as_reference():
            assert torch.equal(answers(policy), before)
        assert torch.equal(answers(policy), after)
    assert (after - before).abs().max() > 0.1
    assert {weight.dtype for weight in policy.weights().values()} == {torch.float32}


# ---- engine and trainer


PROMPTS = [tiny.prompt("1+2="), tiny.prompt("ab", "other")]


async def sampled_from(policy: Policy, weights: dict[str, torch.Tensor]) -> list[Sample]:
    """Answers of an engine that was handed `weights`, which are verified."""
    engine = TorchEngine(policy, lanes=3, decode=tiny.decode, cores=FixedCores(1))
    try:
        await MemorySync(engine, verify=True).sync(weights, 1)
        requests = [SampleRequest(prompt, (0, prompt.uid, m), 12, 1.0) for prompt in PROMPTS for m in range(3)]
        return list(await asyncio.gather(*(engine.sample(request) for request in requests)))
    finally:
        await engine.close()


@every_kind
def test_log_probs_of_the_engine_are_those_of_the_trainer(settings):
    trainer, engine = trained(settings), adapted(settings)
    answers_of_base = answers(engine)
    samples = asyncio.run(sampled_from(engine, trainer.weights()))
    assert all(sample.versions == (1,) * 12 for sample in samples)
    for sample, prompt in zip(samples, [prompt for prompt in PROMPTS for _ in range(3)], strict=True):
        expected = tiny.own_logprobs(trainer, prompt.tokens, sample.tokens)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
        ids = torch.tensor([*prompt.tokens, *sample.tokens])
        ours = answers(trainer, ids)[len(prompt.tokens) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), ours, atol=1e-4, rtol=0)
    assert (answers(engine) - answers_of_base).abs().max() > 0.1


@every_kind
def test_a_copy_shares_nothing(settings):
    policy = trained(settings)
    twin = copy.deepcopy(policy)
    assert fingerprint(twin.weights()) == fingerprint(policy.weights())
    assert_same_frame(twin, policy)
    assert twin.head.weight_VD is twin.model.get_output_embeddings().weight
    before = answers(policy)
    train(twin)
    with twin.as_reference():
        assert torch.equal(answers(twin), answers(make_policy()))
    assert torch.equal(answers(policy), before)


# ---- the reference


@every_kind
def test_the_reference_of_a_new_adapter_is_the_base(settings):
    policy = adapted(settings)
    start = answers(make_policy())
    for _ in range(2):
        with policy.as_reference():
            assert torch.equal(answers(policy), start)
        train(policy)
    after, weights = answers(policy), policy.weights()
    with policy.as_reference():
        reference = answers(policy)
        assert not reference.requires_grad
        assert fingerprint(policy.weights()) == fingerprint(weights), "what is sent is never the reference"
    assert torch.equal(reference, start)
    assert torch.equal(answers(policy), after)
    train(policy)
    assert not torch.equal(answers(policy), after), "training goes on"


@every_kind
def test_the_reference_of_an_adapter_that_was_gone_on_from_is_that_adapter(settings, model_folder, tmp_path):
    first = loaded(model_folder, settings)
    train(first)
    save_policy(first, make_tokenizer(), tmp_path / "first")
    policy = loaded(model_folder, {"kind": settings["kind"], "start": str(tmp_path / "first")}, seed=99)
    start = answers(policy)
    assert torch.equal(start, answers(first))
    bare = answers(load_policy(str(model_folder), "cpu"))
    with policy.as_reference():
        assert torch.equal(answers(policy), start), "KL is 0 at step 0"
    train(policy)
    with policy.as_reference():
        assert torch.equal(answers(policy), start)
        assert (answers(policy) - bare).abs().max() > 0.1, "the bare base would be another reference"
    assert not torch.equal(answers(policy), start)


def test_a_failure_under_the_reference_gives_the_policy_back():
    policy = trained({"kind": "lora"})
    before = fingerprint(policy.weights()), answers(policy)
    with pytest.raises(KeyError), policy.as_reference():
        raise KeyError
    assert fingerprint(policy.weights()) == before[0]
    assert torch.equal(answers(policy), before[1])


def test_a_policy_without_an_adapter_has_no_reference_of_its_own(policy: Policy):
    assert not policy.has_own_reference
    assert adapted({"kind": "lora"}).has_own_reference
    with pytest.raises(AssertionError, match="needs a frozen copy"):
        policy.as_reference()


# ---- saving and going on


def greedy(model: Any, text: str) -> list[int]:
    ids = make_tokenizer()(text, return_tensors="pt")
    generated = model.generate(**ids, max_new_tokens=16, do_sample=False, pad_token_id=END)
    return generated[0, ids["input_ids"].shape[1] :].tolist()


def engine_greedy(policy: Policy, text: str) -> list[int]:
    async def program() -> list[int]:
        engine = TorchEngine(policy, lanes=1, decode=tiny.decode, cores=FixedCores(1))
        request = SampleRequest(Prompt("p", "", tiny.encode(text)), (0,), 16, 0.0, frozenset({END}))
        try:
            return list((await engine.sample(request)).tokens)
        finally:
            await engine.close()

    return asyncio.run(program())


def assert_same_answers(policy: Policy, model: Any) -> None:
    """Plain `transformers` or `peft` against the policy: log-probs to 1e-5, and greedy tokens."""
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=IDS[None], use_cache=False).logits[0].float(), -1)
    torch.testing.assert_close(theirs, answers(policy).detach(), atol=1e-5, rtol=1e-5)
    for text in ("1+2=", "abc", "9"):
        assert greedy(model, text) == engine_greedy(policy, text)


def in_peft(base: Path | str, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for something by an old name
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


@every_kind
def test_a_saved_adapter_is_the_policy_in_plain_peft(settings, model_folder: Path, tmp_path: Path):
    policy = loaded(model_folder, settings)
    train(policy)
    save_policy(policy, make_tokenizer(), tmp_path)
    kept = json.loads((tmp_path / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(model_folder)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "model.safetensors").exists()
    base = kept["base_model_name_or_path"]
    plain = answers(load_policy(str(model_folder), "cpu"))
    assert_same_answers(policy, in_peft(base, tmp_path))
    assert (answers(policy) - plain).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path)("1+2=")["input_ids"] == list(tiny.encode("1+2="))


@every_kind
def test_a_merged_policy_is_the_policy_in_plain_transformers(settings, model_folder: Path, tmp_path: Path):
    policy = loaded(model_folder, settings)
    train(policy)
    before, hashes = answers(policy), (base_of(policy), fingerprint(policy.weights()))
    save_policy(policy, make_tokenizer(), tmp_path, merge=True)
    assert (base_of(policy), fingerprint(policy.weights())) == hashes, "merging does not change what is trained"
    assert torch.equal(answers(policy), before)
    assert not (tmp_path / "adapter_config.json").exists()
    assert_same_answers(policy, AutoModelForCausalLM.from_pretrained(tmp_path))
    names = set(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    assert names == set(AutoModelForCausalLM.from_pretrained(model_folder).state_dict())
    again = loaded(tmp_path, {"kind": "lora"})
    torch.testing.assert_close(answers(again), before, atol=1e-5, rtol=1e-5)


def test_a_relative_base_holds_in_any_directory(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model_folder.parent)
    save_policy(loaded(Path(model_folder.name), {"kind": "lora"}), make_tokenizer(), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_folder)


@every_kind
def test_a_resumed_trainer_is_the_same_and_its_file_holds_the_adapter_alone(settings, tmp_path: Path):
    policy = adapted(settings)
    trainer = make_trainer(policy)
    step(trainer, policy, 3)
    trainer.save(tmp_path)
    state = torch.load(tmp_path / "trainer.pt", weights_only=True)
    assert state["weights"].keys() == policy.weights().keys()
    assert len(state["optimizer"]["state"]) == len(policy.weights())
    resumed_policy = adapted(settings)
    if frame(resumed_policy):
        for tensor in frame(resumed_policy).values():
            tensor.neg_()  # as by an SVD on another machine
    resumed = make_trainer(resumed_policy)
    resumed.load(tmp_path)
    assert_same_frame(resumed_policy, policy)
    for _ in range(3):
        assert step(resumed, resumed_policy, 1) == step(trainer, policy, 1)
        assert torch.equal(answers(resumed_policy), answers(policy))
    with resumed_policy.as_reference():
        assert torch.equal(answers(resumed_policy), answers(make_policy()))


def make_trainer(policy: Policy) -> LocalTrainer:
    return LocalTrainer(policy, Train(learning_rate=0.02), shape=Shape(), num_steps=9)


def step(trainer: LocalTrainer, policy: Policy, num_steps: int) -> list[dict[str, Any]]:
    metrics = []
    for _ in range(num_steps):
        (-answers(policy)[:, 3].sum()).backward()
        metrics.append(dict(trainer.optim_step()))
    return metrics


def test_a_resume_under_another_scale_is_refused(tmp_path: Path):
    make_trainer(adapted({"kind": "lora", "alpha": 32})).save(tmp_path)
    for other in ({"alpha": 16}, {"alpha": 32, "scaling": "sqrt_rank"}):
        trainer = make_trainer(adapted({"kind": "lora", **other}))
        assert "resume with the same ones" in refusal(trainer.load, tmp_path)


def test_a_checkpoint_of_all_weights_is_none_of_an_adapter(policy: Policy, tmp_path: Path):
    make_trainer(policy).save(tmp_path)
    assert "was sent to a model that has none of that name" in refusal(
        make_trainer(adapted({"kind": "lora"})).load, tmp_path
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ["q_prj"]},
            "adapter.targets names q_prj, and LlamaForCausalLM has no layer of that name; the near",
        ),
        ({"targets": ["q_proj", "quartz"]}, "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (
            {"targets": ["lm_head"]},
            "adapter.targets names lm_head, and LlamaForCausalLM has no linear layer of that name",
        ),
        ({"targets": ["embed_tokens"]}, "adapter.targets names embed_tokens, and LlamaForCausalLM has no linear layer"),
        ({"targets": []}, "adapter.targets is empty; LlamaForCausalLM has the linear layers down_proj"),
        ({"rank": 17}, "adapter.rank 17 is more than model.layers.0.self_attn.k_proj (16 x 32) has: give at most 16"),
        (
            {"kind": "tinylora", "rank": 17},
            "adapter.rank 17 is more than model.layers.0.self_attn.k_proj (16 x 32) has",
        ),
    ],
)
def test_settings_that_the_model_can_not_have(settings, message):
    assert message in refusal(adapted, {"kind": "lora", **settings})


def test_a_rank_that_the_chosen_layers_have():
    adapted({"kind": "lora", "rank": 32, "targets": ["q_proj"]})


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("gpt_oss", {}), ("deepseek_v3", {"first_k_dense_replace": 0}), ("deepseek_v3", {"first_k_dense_replace": 2})],
    ids=["experts without names", "experts", "their names alone"],
)
def test_experts_that_are_no_layers_are_not_left_out_in_silence(architecture, settings):
    model = make_model(architecture, **settings)
    message = refusal(adapters.put_into, model, AdapterSettings(kind="lora", rank=4), 0)
    assert message.startswith(
        f"{type(model).__name__} may have experts, which are no linear layers and carry no adapter"
    )
    words = message.rpartition("--adapter.targets ")[2].split(",")
    adapter = adapters.put_into(model, AdapterSettings(kind="lora", rank=4, targets=words), 0)
    assert len(adapter.parameters) == 2 * 2 * len(words)
    for targets in (["down_proj"], ["gate_proj"]):
        if architecture == "deepseek_v3":
            message = refusal(adapted, {"kind": "lora", "targets": targets}, architecture=architecture, **settings)
            assert "may have experts" in message


@pytest.fixture(scope="module")
def start(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter folder, not to be changed: LoRA of rank 3 with alpha 6."""
    folder = tmp_path_factory.mktemp("adapters") / "start"
    policy = loaded(model_folder, {"kind": "lora", "rank": 3, "alpha": 6, "targets": ["q_proj", "up_proj"]})
    train(policy)
    save_policy(policy, make_tokenizer(), folder)
    return folder


def changed(start: Path, tmp_path: Path, **config: Any) -> Path:
    folder = Path(shutil.copytree(start, tmp_path / "changed"))
    kept = json.loads((folder / adapters.CONFIG_FILE).read_text())
    (folder / adapters.CONFIG_FILE).write_text(json.dumps({**kept, **config}))
    return folder


def refused_start(model_folder: Path, folder: Path, **settings: Any) -> str:
    message = refusal(loaded, model_folder, {"kind": "lora", "start": str(folder), **settings})
    assert message.replace("adapter.kind is tinylora, and ", "").startswith(("adapter.", f"adapter.start {folder}"))
    return message


def test_a_start_that_agrees_with_what_is_given_beside_it(model_folder: Path, start: Path):
    beside = {"rank": 3, "alpha": 6, "scaling": "rank", "targets": ["up_proj", "q_proj"]}
    policy = loaded(model_folder, {"kind": "lora", "start": str(start), **beside})
    assert torch.equal(answers(policy), answers(loaded(model_folder, {"kind": "lora", "start": str(start)})))


@pytest.mark.parametrize(
    ("beside", "value"),
    [
        ({"rank": 4}, "set it to 3"),
        ({"alpha": 32}, "set it to 6"),
        ({"scaling": "sqrt_rank"}, "set it to rank"),
        ({"targets": ["q_proj"]}, "set it to q_proj,up_proj"),
    ],
)
def test_a_start_that_says_otherwise(model_folder: Path, start: Path, beside, value):
    (name,) = beside
    message = refused_start(model_folder, start, **beside)
    assert message.startswith(f"adapter.{name} is not that of adapter.start {start}: leave it out, or {value}")


def test_a_start_of_another_kind(model_folder: Path, start: Path):
    message = refused_start(model_folder, start, kind="tinylora")
    assert message == f"adapter.kind is tinylora, and adapter.start {start} is lora: set it to lora"


def test_a_start_that_is_no_adapter_names_what_was_meant(model_folder: Path, start: Path, tmp_path: Path):
    missing = start.parent / "stat"
    assert refused_start(model_folder, missing).endswith(f"has no adapter_config.json; did you mean {start}?")
    run = tmp_path / "run"
    shutil.copytree(start, run / "model")
    assert refused_start(model_folder, run).endswith(f"did you mean {run / 'model'}?")
    assert refused_start(model_folder, model_folder).endswith("an adapter: give it as model.path instead")
    assert refused_start(model_folder, tmp_path / "no" / "where").endswith("it has no adapter_config.json")


def test_an_adapter_that_is_given_as_the_model(start: Path):
    assert refusal(locate, str(start)) == (
        f"{start} is an adapter, no whole model: give it as adapter.start, and its base here"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "is of peft's type IA3; it may be LORA or TINYLORA"),
        ({"use_dora": True}, "uses use_dora, which Headway does not train: give a plain lora"),
        ({"bias": "all"}, "uses bias, which"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save, which"),
        ({"init_lora_weights": "pissa"}, "uses init_lora_weights, which"),
        ({"rank_pattern": {"q_proj": 2}}, "uses rank_pattern, which"),
        ({"invented_later": {"a": 1}}, "uses invented_later, which"),
        ({"target_modules": ["q_prrj"]}, "does not fit LlamaForCausalLM: Target modules {'q_prrj'} not found"),
        ({"target_modules": ["embed_tokens"]}, "changes the embedding or the LM head, which Headway keeps as it is"),
        ({"target_modules": ["v_proj"]}, "does not fit LlamaForCausalLM: weight base_model.model.model.layers"),
        ({"r": 2}, "does not fit LlamaForCausalLM: weight base_model.model.model.layers"),
        ({"r": -1}, "does not fit LlamaForCausalLM: `r` should be a positive integer value"),
    ],
)
def test_a_start_that_can_not_be_trained_as_it_was_made(
    model_folder: Path, start: Path, tmp_path: Path, config, message
):
    assert message in refused_start(model_folder, changed(start, tmp_path, **config))


def test_a_start_whose_files_are_broken(model_folder: Path, start: Path, tmp_path: Path):
    folder = Path(shutil.copytree(start, tmp_path / "broken"))
    weights = load_file(folder / adapters.WEIGHTS_FILE)
    name = min(weights)
    save_file({n: weight for n, weight in weights.items() if n != name}, folder / adapters.WEIGHTS_FILE)
    assert f"weight {name} of the receiving model was not sent" in refused_start(model_folder, folder)
    (folder / adapters.WEIGHTS_FILE).write_bytes(b"")
    assert "adapter_model.safetensors can't be read" in refused_start(model_folder, folder)
    (folder / adapters.WEIGHTS_FILE).unlink()
    assert "adapter_model.safetensors can't be read" in refused_start(model_folder, folder)
    (folder / adapters.CONFIG_FILE).write_text("{")
    assert "adapter_config.json is no JSON" in refused_start(model_folder, folder)
    (folder / adapters.CONFIG_FILE).write_text("[]")
    assert "holds no JSON object" in refused_start(model_folder, folder)


def test_a_start_made_on_a_model_of_other_sizes(start: Path, tmp_path: Path):
    other = tiny.write_model_folder(tmp_path / "wide", hidden_size=64)
    message = refused_start(other, start)
    assert "does not fit LlamaForCausalLM: weight base_model" in message
    assert "; it was made on " in message


def test_an_adapter_of_peft_itself_is_gone_on_from(model_folder: Path, tmp_path: Path):
    config = LoraConfig(r=2, lora_alpha=7, lora_dropout=0.3, target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for something by an old name
        model = PeftModel(make_model(tie_word_embeddings=True), config)
        model.save_pretrained(tmp_path, save_embedding_layers=False)
    policy = loaded(model_folder, {"kind": "lora", "start": str(tmp_path)})
    assert torch.equal(answers(policy), answers(policy)), "its dropout is off"
    assert_same_answers(policy, in_peft(model_folder, tmp_path))
    assert (answers(policy) - answers(load_policy(str(model_folder), "cpu"))).abs().max() > 0.01
