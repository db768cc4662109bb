"""gnmr in transformers.Trainer: one callback.

Runs in a few seconds on a CPU:  python examples/trainer.py
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gnmr
from gnmr.integrations.transformers import GuardCallback

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
text = torch.tensor(list(Path(__file__).read_bytes()))
windows = [text[i : i + 64] for i in range(0, len(text) - 64, 4)]
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments("run", max_steps=20, logging_steps=10, use_cpu=True, report_to="none"),
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],
)
callback = GuardCallback(
    trainer,
    gnmr.Simulated(low="e3m2", high="hybrid-fp8"),  # 6-bit matrix products, FP8 on recovery
    gnmr.Policy(max_active=1, alpha=((0.0, 1.5), (0.1, 1.1))),  # two stages, as in the paper
    granularity="block",  # a decoder layer is one unit
)
trainer.add_callback(callback)
trainer.train()
print(callback.guard.ledger.promotion_ratio, callback.guard.active)
