"""Benchmarks of causal language models, item by item, so that two models can be compared on the same items.

The prompts and the scoring are those of ``lm-eval``, from files on the disk (:mod:`gnmr.lab.evaluate.tasks`) or from
any task of ``lm-eval`` (:mod:`gnmr.lab.evaluate.harness`).
"""
