"""A training run in a process of its own, for a test to kill: FOLDER slow | resume."""

import importlib.util
import sys
import time
from pathlib import Path

import torch

from gnmr import Policy


def main(folder: Path, mode: str) -> None:
    spec = importlib.util.spec_from_file_location("test_trainer", Path(__file__).with_name("test_trainer.py"))
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    policy = Policy(max_active=2, alpha=1.01, window=2)
    host, watcher = tests.make(folder, policy, save_strategy="steps", save_steps=2, max_steps=8)
    if mode == "slow":
        compute = host.compute_loss
        host.compute_loss = lambda *args, **kwargs: (time.sleep(0.2), compute(*args, **kwargs))[1]
    host.train(resume_from_checkpoint=mode == "resume")
    torch.save({"weights": tests.weights(host), "guard": watcher.guard.state_dict()}, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
