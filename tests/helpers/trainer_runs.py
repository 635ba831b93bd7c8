"""Small models, data and arguments for trainers of transformers and TRL."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fewbit.analysis.step_meter import StepMeter

VOCABULARY = 96
USUAL = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
"""Arguments of all trainers."""


def llama(dropout=0.1, seed=0, **changes):
    """Return a small model with random weights, and dropout in attention."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": dropout}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    usual = {"vocab_size": VOCABULARY, **sizes, **heads, **special}
    config = LlamaConfig(**{**usual, **changes})
    return LlamaForCausalLM(config)


def texts(count, length=32, seed=1):
    """Return samples of random tokens, with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def weights(model):
    """Return all parameters of a model as bytes."""
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def logged(trainer, name):
    """Return the values of a metric that a trainer has logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def saved_by_step(trainer):
    """Return the bytes that a trainer's model has saved in one training step, with its loss."""
    batches = iter(trainer.get_train_dataloader())
    (batch,), count = trainer.get_batch_samples(batches, 1, trainer.args.device)
    trainer.current_gradient_accumulation_steps = 1
    meter = StepMeter()
    meter.begin(trainer.model)
    trainer.training_step(trainer.model, batch, count)
    meter.end()
    trainer.model.zero_grad()
    return meter.total
