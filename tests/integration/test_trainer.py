"""GuardCallback in a real transformers.Trainer: what it sees, and that it disturbs nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gnmr import GuardError, Policy, StateError
from gnmr.integrations.transformers import GuardCallback
from toys import Quiet

QUIET = Policy(max_active=0)

# transformers renamed the argument in its fifth generation.
CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)


def data(rows=64):
    tokens = torch.randint(32, (rows, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make(folder, policy=QUIET, *, guarded=True, paths=None, callback=None, trainer=Trainer, **args):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    host = trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(**settings | args),
        train_dataset=data(),
        eval_dataset=data(8),
    )
    if not guarded:
        return host, None
    watcher = GuardCallback(host, Quiet() if paths is None else paths, policy, **callback or {})
    host.add_callback(watcher)
    return host, watcher


class Norms:
    """Keeps the norms that the guard read, as a host for tests of what it sees."""

    def __init__(self, watcher, monkeypatch):
        self.seen = []
        begin = watcher.on_train_begin

        def on_train_begin(*args, **kwargs):
            begin(*args, **kwargs)
            update = watcher.guard.controller.update
            watcher.guard.controller.update = lambda norms, observed: (
                self.seen.append(norms.copy()),
                update(norms, observed),
            )[1]

        monkeypatch.setattr(watcher, "on_train_begin", on_train_begin)


def run(folder, monkeypatch, **args):
    host, watcher = make(folder, **args)
    norms = Norms(watcher, monkeypatch)
    host.train()
    return np.array(norms.seen), host, watcher


def weights(host):
    return {name: value.clone() for name, value in host.model.state_dict().items()}


def assert_equal_weights(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e-3, 0.0])
def test_the_first_norms_are_unclipped_whatever_the_trainer_clips_to(tmp_path, monkeypatch, max_grad_norm):
    free, host, _ = run(tmp_path / "a", monkeypatch, max_grad_norm=1e9, max_steps=1)
    seen, clipped, _ = run(tmp_path / "b", monkeypatch, max_grad_norm=max_grad_norm, max_steps=1)

    np.testing.assert_array_equal(seen, free)
    assert (free > 0).all()
    logged = [h.state.log_history[0]["grad_norm"] for h in (host, clipped)]
    assert logged[0] == logged[1] > np.sqrt((free**2).sum())


def test_accumulation_of_four_equals_one_batch(tmp_path, monkeypatch):
    one, *_ = run(tmp_path / "a", monkeypatch)
    four, *_ = run(tmp_path / "b", monkeypatch, per_device_train_batch_size=2, gradient_accumulation_steps=4)

    assert four.shape == (4, 14)
    np.testing.assert_allclose(one, four, rtol=1e-4)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"max_grad_norm": 1e-3},
        {"max_grad_norm": 0.0},
        {"bf16": True},
        {"gradient_accumulation_steps": 2, CHECKPOINTING: True},
    ],
    ids=["default", "tiny clip", "no clip", "bf16 autocast", "accumulation and checkpointing"],
)
def test_the_weights_are_those_of_a_run_without_gnmr(tmp_path, args):
    plain, _ = make(tmp_path / "a", guarded=False, **args)
    guarded, watcher = make(tmp_path / "b", **args)

    plain.train(), guarded.train()

    assert_equal_weights(weights(plain), weights(guarded))
    assert watcher.guard.controller.step == 4
    mine, other = (
        [row["grad_norm"] for row in host.state.log_history if "grad_norm" in row] for host in (guarded, plain)
    )
    np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_an_older_trainer_that_does_not_clip_at_zero_is_seen_too(tmp_path, monkeypatch):
    class Older(Trainer):
        def _get_grad_norm(self, model, grad_norm=None):
            return grad_norm

    _, _, watcher = run(tmp_path, monkeypatch, trainer=Older, max_grad_norm=0.0)

    assert watcher.guard.controller.step == 4


def test_a_trainer_with_its_own_clipping_is_refused(tmp_path):
    class Own(Trainer):
        def _clip_grad_norm(self, model):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    host, _ = make(tmp_path, trainer=Own)

    with pytest.raises(GuardError, match="the gradients were not read.*its own clipping"):
        host.train()


def test_evaluation_during_training_leaves_no_trace(tmp_path):
    plain, _ = make(tmp_path / "a")
    evaluated, watcher = make(tmp_path / "b", eval_strategy="steps", eval_steps=1)

    plain.train(), evaluated.train()

    assert_equal_weights(weights(plain), weights(evaluated))
    assert watcher.guard.controller.step == 4


def test_a_promotion_in_the_trainer(tmp_path):
    host, watcher = make(tmp_path, Policy(max_active=2, alpha=0.5), max_steps=6)

    host.train()

    assert watcher.guard.ledger.promotions.sum() > 0
    assert watcher.guard.ledger.active_steps.max() <= 6


@pytest.mark.parametrize("args", [{}, {"bf16": True}])
def test_resume_is_bit_for_bit(tmp_path, args):
    policy = Policy(max_active=2, alpha=1.01, window=2)
    whole, first = make(tmp_path / "a", policy, save_strategy="steps", save_steps=3, max_steps=6, **args)
    whole.train()
    resumed, second = make(tmp_path / "a", policy, save_strategy="steps", save_steps=3, max_steps=6, **args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))

    assert first.guard.ledger.promotions.sum() > 0
    assert_equal_weights(weights(whole), weights(resumed))
    assert second.guard.state_dict() == first.guard.state_dict()
    saved = json.loads((tmp_path / "a" / "checkpoint-6" / "gnmr.json").read_text())
    assert saved == json.loads(json.dumps(first.guard.state_dict()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"gnmr\.json is not there: the checkpoint was saved without gnmr"),
        (lambda path: path.write_text(path.read_text()[:100]), r"checkpoint-2/gnmr\.json cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), r"checkpoint-2/gnmr\.json cannot be read"),
        (lambda path: path.write_text("[1]"), r"checkpoint-2/gnmr\.json holds no guard state, but a JSON list"),
        (lambda path: path.write_text("{}"), r"no guard state of schema 1"),
    ],
    ids=["missing", "truncated", "not text", "a list", "empty"],
)
def test_a_missing_or_damaged_state_is_named_and_nothing_is_lost(tmp_path, damage, message):
    host, _ = make(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    host.train()
    damage(tmp_path / "checkpoint-2" / "gnmr.json")
    files = sorted(tmp_path.rglob("*"))

    host, _ = make(tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(StateError, match=message):
        host.train(resume_from_checkpoint=True)

    assert sorted(tmp_path.rglob("*")) == files


def test_resume_with_another_policy_names_the_field(tmp_path):
    host, _ = make(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    host.train()

    host, _ = make(tmp_path, Policy(max_active=0, alpha=1.2), max_steps=4)
    with pytest.raises(StateError, match=r"policy\.alpha = 1\.5, and now it is 1\.2"):
        host.train(resume_from_checkpoint=True)


def test_resume_from_a_folder_elsewhere(tmp_path):
    host, _ = make(tmp_path / "a", save_strategy="steps", save_steps=2, max_steps=2)
    host.train()
    folder = tmp_path / "a" / "checkpoint-2"

    host, watcher = make(tmp_path / "b", callback={"resume_from": folder})
    host.train(resume_from_checkpoint=str(folder))

    assert watcher.guard.controller.step == 4


def test_training_twice_starts_afresh(tmp_path):
    host, watcher = make(tmp_path)
    keys = list(host.model.state_dict())

    host.train()
    first = watcher.guard
    host.train()

    assert watcher.guard is not first
    assert watcher.guard.controller.step == 4
    assert list(host.model.state_dict()) == keys
    assert "clip_grad_norm_" not in vars(host.accelerator)


def test_training_goes_on_after_an_error_in_the_middle(tmp_path):
    host, watcher = make(tmp_path)
    compute = host.compute_loss
    host.compute_loss = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        host.train()
    host.compute_loss = compute

    host.train()

    assert watcher.guard.controller.step == 4


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    from accelerate.utils import DistributedType

    host, watcher = make(tmp_path)
    monkeypatch.setattr(host.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)

    with pytest.raises(GuardError, match=r"under DeepSpeed.*steps inside backward.*train with DDP or FSDP"):
        watcher.on_train_begin(host.args, host.state, host.control, model=host.model)


def test_fractions_are_resolved_with_the_trainers_steps(tmp_path):
    policy = Policy(max_active=1, alpha=((0.0, 1.5), (0.5, 1.1)))
    host, watcher = make(tmp_path, policy, max_steps=4)

    host.train()

    assert watcher.guard.policy.alpha == ((1, 1.5), (3, 1.1))


def test_a_killed_run_is_resumed_to_the_same_end(tmp_path):
    script = [sys.executable, str(Path(__file__).with_name("killed_run.py"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    child = subprocess.Popen([*script, str(tmp_path / "a"), "slow"], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "a" / "checkpoint-4" / "gnmr.json").exists():
            assert child.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    subprocess.run([*script, str(tmp_path / "a"), "resume"], env=environment, check=True, timeout=120)
    policy = Policy(max_active=2, alpha=1.01, window=2)
    whole, watcher = make(tmp_path / "b", policy, save_strategy="steps", save_steps=2, max_steps=8)
    whole.train()

    end = torch.load(tmp_path / "a" / "end.pt", weights_only=True)
    assert_equal_weights(end["weights"], weights(whole))
    assert end["guard"] == watcher.guard.state_dict()
