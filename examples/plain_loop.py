"""gnmr in a training loop of your own: two lines in the loop, a trace at the end.

Runs in a few seconds on a CPU:  python examples/plain_loop.py
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gnmr

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = torch.tensor(list(Path(__file__).read_bytes()))

guard = gnmr.Guard(
    model,
    gnmr.SavedActivations(low="e2m1", high="e4m3"),  # 4-bit activations for backward, 8-bit on recovery
    gnmr.Policy(max_active=3),  # at most 3 of the 14 projections on the recovery path
    record="run.arrow",
)
for step in range(50):
    starts = torch.randint(len(text) - 64, (8,))
    batch = torch.stack([text[start : start + 64] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    guard.step()  # reads the gradients of this step, sets the paths of the next
    guard.clip_grad_norm_(1.0)  # reuses the norms just read
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}, on recovery next: {', '.join(guard.active) or 'none'}")

print(f"promotion ratio {guard.ledger.promotion_ratio:.3f}; the last of the stays on recovery:")
for span in guard.ledger.spans[-3:]:
    print(" ", span)
guard.detach()  # the model is as it was; run.parquet holds the trace: gnmr replay run.parquet --alpha 2
