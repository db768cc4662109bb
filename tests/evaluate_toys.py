"""Tiny models, and a few items in each task's own form, that the tests of evaluation share."""

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gnmr.lab.pretrained import Pretrained, byte_tokenizer

WORDS = ["water", "fire", "stone", "paper", "wind", "river", "copper", "sand", "glass", "cloud", "wool", "salt"]


def llama(seed=0, positions=512, **shape):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        **shape,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def pretrained(seed=0, positions=512):
    return Pretrained(llama(seed, positions), byte_tokenizer(), f"toy-{seed}")


def saved(folder, seed=0, positions=512):
    llama(seed, positions).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def word(place):
    return WORDS[place % len(WORDS)]


def rows(task, count=6):
    """Items in the form that the task's own data set has."""
    if task == "hellaswag":
        return [
            {
                "activity_label": "Roof [title] work",
                "ctx_a": f"A man with {word(i)} is sitting on a roof.",
                "ctx_b": "he",
                "endings": [f"is using {word(i + j)}{' very slowly' * j}. [step]  Done." for j in range(4)],
                "label": str(i % 4),
            }
            for i in range(count)
        ]
    if task == "piqa":
        return [
            {"goal": f"melt {word(i)}", "sol1": f"use é{word(i)}", "sol2": f"use {word(i + 1)} twice", "label": i % 2}
            for i in range(count)
        ]
    if task in ("arc_easy", "arc_challenge"):
        return [
            {
                "question": f"What is {word(i)}?",
                "choices": {
                    "text": [word(i + j) * (j + 1) for j in range(3 + i % 2)],
                    "label": list("ABCD")[: 3 + i % 2],
                },
                "answerKey": "ABC"[i % 3],
            }
            for i in range(count)
        ]
    if task == "openbookqa":
        return [
            {
                "question_stem": f"The {word(i)} is",
                "choices": {"text": [word(i + j) for j in range(4)], "label": list("ABCD")},
                "answerKey": " ABCD"[1 + i % 4],
            }
            for i in range(count)
        ]
    if task == "sciq":
        return [
            {
                "support": f" All about {word(i)}." if i % 2 else "",
                "question": f"Which {word(i)}?",
                "distractor1": word(i + 1),
                "distractor2": word(i + 2),
                "distractor3": word(i + 3),
                "correct_answer": word(i + 4),
            }
            for i in range(count)
        ]
    if task == "mmlu":
        return [
            {
                "question": f" Which of {word(i)}? ",
                "subject": ["high_school_physics", "law"][i % 2],
                "choices": [word(i + j) for j in range(4)],
                "answer": i % 4,
            }
            for i in range(count)
        ]
    return [
        {"question": f"There are {i} {word(i)}. How many?", "answer": f"It is <<{i}+0={i}>>{i}.\n#### {i}"}
        for i in range(count)
    ]


def write(folder, task, split, items):
    path = folder / task / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in items))
    return path
