"""The sections of a recipe, each with its keys, their kinds and their defaults."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gnmr.lab.arms import VARIANT, parse_arm

ArmName = Annotated[str, AfterValidator(lambda name: parse_arm(name).name)]
VariantName = Annotated[str, Field(pattern=VARIANT)]

# Strict: the text "400" and the truth value true are no numbers of steps.
Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Section(BaseModel):
    """Unknown keys are errors, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """A LLaMA of these shapes, a Mixtral where there are experts, or any causal LM by hub name or path."""

    name_or_path: str | None = None
    hidden_size: Positive = 64
    intermediate_size: Positive = 172
    num_hidden_layers: Positive = 4
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive | None = None
    num_experts: Positive | None = None
    num_experts_per_tok: Positive = 2
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {heads}")
        if self.hidden_size // heads % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {self.hidden_size // heads}, and rotary positions need an even "
                "number"
            )
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is above num_experts {self.num_experts}")
        return self


class Adapter(Section):
    """LoRA adapters (PEFT) on the frozen model; the defaults are the paper's, setting C."""

    r: Positive = 8
    alpha: Positive = 16
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.05
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class Data(Section):
    """Text, how it becomes tokens, and what is held out.

    ``name`` is ``embedded``, a file, folder or glob (text, JSONL, Parquet), or a hub name. Held out is
    ``validation_name`` (another file), or ``validation_split`` (of a hub's data set), or a twentieth. The tokenizer
    ``model`` is the pre-trained model's own. The format ``instruction`` has a prompt and a response a row, or
    ``messages``: see :mod:`gnmr.lab.instructions`.
    """

    name: str = "embedded"
    config: str | None = None
    split: str = "train"
    validation_name: str | None = None
    validation_split: str | None = None
    format: Literal["text", "instruction"] = "text"
    text_column: str = "text"
    prompt_column: str = "prompt"
    response_column: str = "response"
    streaming: bool = Field(default=False, strict=True)
    tokenizer: str = "bytes"
    vocab_size: Annotated[int, Field(ge=257, strict=True)] = 4096
    sequence_length: Annotated[int, Field(ge=2, strict=True)] = 64
    eval_sequences: Positive = 512

    @model_validator(mode="after")
    def _embedded_is_whole(self) -> Self:
        if self.name == "embedded":
            for key in ("config", "validation_name", "validation_split", "streaming"):
                if getattr(self, key):
                    raise ValueError(f"{key} does not apply to the embedded text: leave it out")
        return self

    @model_validator(mode="after")
    def _instructions_are_whole(self) -> Self:
        if self.format == "instruction":
            if self.name == "embedded":
                raise ValueError("format = 'instruction' needs rows with a prompt and a response: set name to a file")
            if self.streaming:
                raise ValueError("format = 'instruction' is read whole: set streaming = false")
            if self.tokenizer in ("bytes", "bpe"):
                raise ValueError("format = 'instruction' needs a pre-trained tokenizer: set tokenizer = 'model'")
        return self


class Optimizer(Section):
    """AdamW with linear warm-up and a cosine to a share of the peak; without weight decay it is Adam."""

    lr: Annotated[Real, Field(gt=0)] = 1e-3
    beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[Real, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    warmup_fraction: Annotated[Real, Field(ge=0, lt=1)] = 0.1
    min_lr_ratio: Annotated[Real, Field(ge=0, le=1)] = 0.1
    max_grad_norm: Annotated[Real, Field(ge=0)] = 0.0


class Units(Section):
    """Which parts of the model are units: see :func:`gnmr.find_units`."""

    granularity: Literal["operator", "expert", "block"] = "operator"
    watch: Literal["weight", "adapter", "output_grad"] = "weight"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()


class Stress(Section):
    """Seeded faults in the low-cost path of one unit at a time: see :mod:`gnmr.lab.stress`."""

    kind: Literal["gradient_scale", "stale_scale", "saturation", "nan"]
    first_step: Positive = 50
    every: Positive = 25
    duration: Positive = 12
    factor: Annotated[Real, Field(gt=0)] = 16.0
    at: Literal["cast", "output"] | None = None


class Run(Section):
    """How long, how large, how often, on how many threads."""

    steps: Annotated[int, Field(ge=1, le=100_000_000, strict=True)] = 400
    batch_size: Positive = 8
    gradient_accumulation: Positive = 1
    eval_every: Positive = 100
    save_every: Positive = 200
    log_every: Positive = 1
    seeds: tuple[Count, ...] = (0, 1, 2)
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    bf16_autocast: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be distinct, at least one, got {list(self.seeds)}")
        return self
