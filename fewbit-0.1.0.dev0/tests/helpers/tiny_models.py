"""Configurations of small models of transformers, without dropout."""

from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.vit.configuration_vit import ViTConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {**SIZES, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bert():
    return BertConfig(**TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def gpt2():
    return GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=100,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )


def vit():
    return ViTConfig(**SIZES, image_size=32, patch_size=8)


def llama():
    return LlamaConfig(**TOKENS, num_key_value_heads=2)


def t5():
    return T5Config(
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )


def qwen3():
    return Qwen3Config(**TOKENS, num_key_value_heads=2, head_dim=16)


def mixtral():
    return MixtralConfig(
        **TOKENS, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
