"""Small models of transformers, diffusers, timm and torch.nn with random weights, each with a batch and its usual loss.

`ZOO` has the `Entry` of each architecture. Layers are 128 wide, texts have 128 tokens, and images mostly 64 x 64 pixels, so
that activations and not fixed sizes dominate what a forward saves. Dropout is off, because torch saves its masks on a CPU
in 4 bytes per element and on a GPU in 1 byte, and because gradients can then be compared. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from networks import timm_models
from torch import nn
from torch.nn import functional as F

VOCABULARY, BATCH, LENGTH, WIDTH, IMAGES = 512, 4, 128, 128, 64
CLASSES = 10


class Step(NamedTuple):
    """A model and the loss of one batch.

    Attributes:
        model: the model, in training mode.
        loss: a function (model) that returns the loss of the batch, a scalar.
    """

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


class Entry(NamedTuple):
    """An architecture.

    Attributes:
        name: the name in the table.
        library: the library that has the architecture: "transformers", "diffusers", "timm" or "torch".
        build: a function without arguments that returns a `Step`.
    """

    name: str
    library: str
    build: Callable[[], Step]


# -- Batches -------------------------------------------------------------------------------------------------


def _tokens(length=LENGTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _normal(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _classes(*shape, most=CLASSES, seed=3):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def _text():
    return {"input_ids": _tokens(), "labels": _tokens()}


def _translation():
    return {"input_ids": _tokens(), "labels": _tokens(seed=4)}


def _images(size=IMAGES, batch=BATCH):
    return {"pixel_values": _normal(batch, 3, size, size), "labels": _classes(batch)}


def _segmentation():
    labels = _classes(BATCH, IMAGES, IMAGES)
    return {"pixel_values": _normal(BATCH, 3, IMAGES, IMAGES), "labels": labels}


def _speech():
    return {"input_values": _normal(BATCH, 16000), "labels": _tokens(12)}


def _spectrum():
    return {"input_features": _normal(BATCH, 80, 2 * LENGTH), "labels": _tokens(64)}


def _pairs():
    pixels = _normal(BATCH, 3, IMAGES, IMAGES)
    return {"input_ids": _tokens(32), "pixel_values": pixels, "return_loss": True}


def _boxes():
    targets = [
        {"class_labels": _classes(3, seed=n), "boxes": _normal(3, 4, seed=n).sigmoid()}
        for n in range(BATCH)
    ]
    return {"pixel_values": _normal(BATCH, 3, 2 * IMAGES, 2 * IMAGES), "labels": targets}


# -- transformers --------------------------------------------------------------------------------------------

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BLOCKS = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT = {**_IDS, **_BLOCKS}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_GPT = {**_IDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_CODERS = {
    **_IDS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "decoder_start_token_id": 1,
}
_T5 = {
    **_IDS,
    "d_model": WIDTH,
    "d_ff": 2 * WIDTH,
    "d_kv": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_PATCHES = {**_BLOCKS, "image_size": IMAGES, "patch_size": 8, "num_labels": CLASSES}
_STAGES = {"depths": [2, 2], "num_labels": CLASSES}
_SWIN = {
    **_STAGES,
    "image_size": IMAGES,
    "patch_size": 4,
    "embed_dim": 64,
    "num_heads": [2, 4],
    "window_size": 8,
}
_SOUND = {
    **_TEXT,
    "conv_dim": (64, 64, 64),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_RESNET = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2]}
_QWEN_VISION = {
    "depth": 2,
    "embed_dim": WIDTH,
    "hidden_size": WIDTH,
    "num_heads": 4,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}


def _without_dropout(config):
    """Set every rate of dropout in a configuration, and in the configurations inside it, to 0."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name in ("resid_pdrop", "embd_pdrop")):
            setattr(config, name, 0.0)
    return config


class _OfTransformers(NamedTuple):
    """The build of an `Entry` for a model of transformers, which computes its own loss.

    Attributes:
        cls: the name of the class.
        settings: the settings of its configuration.
        batch: a function that returns the keyword arguments of the forward.
    """

    cls: str
    settings: dict
    batch: Callable[[], dict]

    def __call__(self):
        import transformers

        cls = getattr(transformers, self.cls)
        model = cls(_without_dropout(cls.config_class(**self.settings)))
        arguments = self.batch()
        return Step(model.train(), lambda model: model(**arguments).loss)


def _detr():
    import transformers

    backbone = transformers.ResNetConfig(**_RESNET, out_features=["stage2"])
    settings = {
        **{key: value for key, value in _CODERS.items() if "token" not in key},
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
        "num_queries": 32,
        "num_labels": CLASSES,
    }
    return _OfTransformers("DetrForObjectDetection", settings, _boxes)()


def _qwen_vl():
    import transformers

    image, start = 5, 6
    text = {**_GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=_QWEN_VISION,
        image_token_id=image,
        vision_start_token_id=start,
        video_token_id=7,
    )
    model = transformers.Qwen2VLForConditionalGeneration(_without_dropout(config)).train()
    rows = columns = 8
    ids = _tokens().clamp(min=10)
    ids[:, 4] = start
    ids[:, 5 : 5 + rows * columns // 4] = image
    arguments = {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": _normal(BATCH * rows * columns, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * BATCH),
    }
    return Step(model, lambda model: model(**arguments).loss)


_ENTRIES_OF_TRANSFORMERS = (
    ("GPT-2", "GPT2LMHeadModel", _GPT, _text),
    ("GPT-J", "GPTJForCausalLM", {**_GPT, "rotary_dim": 16}, _text),
    ("GPT-NeoX", "GPTNeoXForCausalLM", _TEXT, _text),
    ("OPT", "OPTForCausalLM", {**_TEXT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}, _text),
    ("BLOOM", "BloomForCausalLM", {**_IDS, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}, _text),
    ("Falcon", "FalconForCausalLM", _TEXT, _text),
    ("Llama", "LlamaForCausalLM", _GROUPED, _text),
    ("Mistral", "MistralForCausalLM", _GROUPED, _text),
    ("Qwen2", "Qwen2ForCausalLM", _GROUPED, _text),
    ("Qwen3", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 32}, _text),
    ("Gemma 2", "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 32}, _text),
    ("Gemma 3", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 32}, _text),
    ("Phi-3", "Phi3ForCausalLM", _GROUPED, _text),
    ("OLMo2", "Olmo2ForCausalLM", _GROUPED, _text),
    ("Cohere", "CohereForCausalLM", _GROUPED, _text),
    ("StableLM", "StableLmForCausalLM", _GROUPED, _text),
    ("Granite", "GraniteForCausalLM", _GROUPED, _text),
    ("Mixtral", "MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}, _text),
    ("Qwen3-MoE", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "head_dim": 32}, _text),
    ("OLMoE", "OlmoeForCausalLM", {**_EXPERTS, "num_experts": 4}, _text),
    ("gpt_oss", "GptOssForCausalLM", {**_EXPERTS, "num_local_experts": 4, "head_dim": 32}, _text),
    (
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS,
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        _text,
    ),
    (
        "Llama 4",
        "Llama4ForCausalLM",
        {**_EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 256, "head_dim": 32},
        _text,
    ),
    (
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        {
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 128,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
        _text,
    ),
    (
        "Mamba",
        "MambaForCausalLM",
        {**_IDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8},
        _text,
    ),
    (
        "Mamba2",
        "Mamba2ForCausalLM",
        {
            **_IDS,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
        _text,
    ),
    (
        "RWKV",
        "RwkvForCausalLM",
        {
            **_TEXT,
            "hidden_size": 2 * WIDTH,
            "attention_hidden_size": 2 * WIDTH,
            "context_length": LENGTH,
        },
        _text,
    ),
    (
        "Jamba",
        "JambaForCausalLM",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
        _text,
    ),
    (
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        {**_GROUPED, "num_hidden_layers": 3, "lru_width": WIDTH, "attention_window_size": 64},
        _text,
    ),
    ("T5", "T5ForConditionalGeneration", _T5, _translation),
    (
        "T5 gated",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        _translation,
    ),
    ("BART", "BartForConditionalGeneration", _CODERS, _translation),
    ("Marian", "MarianMTModel", {**_CODERS, "decoder_vocab_size": VOCABULARY}, _translation),
    (
        "LED",
        "LEDForConditionalGeneration",
        {**_CODERS, "attention_window": 32},
        _translation,
    ),
    ("BERT", "BertForMaskedLM", _TEXT, _text),
    ("RoBERTa", "RobertaForMaskedLM", _TEXT, _text),
    (
        "ModernBERT",
        "ModernBertForMaskedLM",
        {**_TEXT, "cls_token_id": 1, "sep_token_id": 2},
        _text,
    ),
    (
        "DistilBERT",
        "DistilBertForMaskedLM",
        {**_IDS, "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 2, "n_heads": 4},
        _text,
    ),
    ("ELECTRA", "ElectraForMaskedLM", {**_TEXT, "embedding_size": WIDTH}, _text),
    (
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _text,
    ),
    ("ALBERT", "AlbertForMaskedLM", {**_TEXT, "embedding_size": 64}, _text),
    ("FNet", "FNetForMaskedLM", _TEXT, _text),
    (
        "XLNet",
        "XLNetLMHeadModel",
        {**_IDS, "d_model": WIDTH, "d_inner": 2 * WIDTH, "n_layer": 2, "n_head": 4},
        _text,
    ),
    ("Longformer", "LongformerForMaskedLM", {**_TEXT, "attention_window": [32, 32]}, _text),
    (
        "ESM",
        "EsmForMaskedLM",
        {**_TEXT, "position_embedding_type": "rotary", "mask_token_id": 4},
        _text,
    ),
    (
        "Whisper",
        "WhisperForConditionalGeneration",
        {**_CODERS, "max_source_positions": LENGTH, "max_target_positions": LENGTH},
        _spectrum,
    ),
    ("Wav2Vec2", "Wav2Vec2ForCTC", _SOUND, _speech),
    ("HuBERT", "HubertForCTC", _SOUND, _speech),
    (
        "CLIP",
        "CLIPModel",
        {
            "text_config": {**_TEXT, "eos_token_id": 2},
            "vision_config": _PATCHES,
            "projection_dim": WIDTH,
        },
        _pairs,
    ),
    (
        "SigLIP",
        "SiglipModel",
        {"text_config": _TEXT, "vision_config": _PATCHES},
        _pairs,
    ),
    ("ViT", "ViTForImageClassification", _PATCHES, _images),
    ("DeiT", "DeiTForImageClassification", _PATCHES, _images),
    ("DINOv2", "Dinov2ForImageClassification", _PATCHES, _images),
    ("BEiT", "BeitForImageClassification", _PATCHES, _images),
    ("Swin", "SwinForImageClassification", _SWIN, _images),
    ("SwinV2", "Swinv2ForImageClassification", _SWIN, _images),
    (
        "SegFormer",
        "SegformerForSemanticSegmentation",
        {
            "num_labels": CLASSES,
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sr_ratios": [4, 2],
            "hidden_sizes": [64, 128],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [4, 4],
            "decoder_hidden_size": WIDTH,
        },
        _segmentation,
    ),
    (
        "ConvNeXt",
        "ConvNextForImageClassification",
        {**_STAGES, "hidden_sizes": [64, 128], "num_stages": 2},
        _images,
    ),
    (
        "ConvNeXtV2",
        "ConvNextV2ForImageClassification",
        {**_STAGES, "hidden_sizes": [64, 128], "num_stages": 2},
        _images,
    ),
    ("ResNet", "ResNetForImageClassification", {**_RESNET, "num_labels": CLASSES}, _images),
    (
        "MobileViT",
        "MobileViTForImageClassification",
        {
            "num_labels": CLASSES,
            "image_size": 2 * IMAGES,
            "hidden_sizes": [64, 80, 96],
            "neck_hidden_sizes": [16, 16, 32, 64, 80, 96, 320],
        },
        lambda: _images(2 * IMAGES, 8),
    ),
)


# -- diffusers -----------------------------------------------------------------------------------------------


def _predicted(call, target):
    """Return the mean squared error of a model's prediction, as in the training of a diffusion model."""
    return lambda model: F.mse_loss(call(model), target)


def _unet():
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    x, time = _normal(BATCH, 3, 32, 32), _classes(BATCH, most=1000)
    return Step(model, _predicted(lambda model: model(x, time).sample, _normal(*x.shape, seed=5)))


def _conditional_unet():
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
    )
    x, time, text = (
        _normal(BATCH, 4, 32, 32),
        _classes(BATCH, most=1000),
        _normal(BATCH, 32, WIDTH, seed=6),
    )
    call = lambda model: model(x, time, encoder_hidden_states=text).sample  # noqa: E731
    return Step(model, _predicted(call, _normal(*x.shape, seed=5)))


def _autoencoder():
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        layers_per_block=1,
        sample_size=IMAGES,
    )
    x = _normal(BATCH, 3, IMAGES, IMAGES)
    return Step(model, _predicted(lambda model: model(x).sample, x))


def _dit():
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, num_layers=2, sample_size=32, in_channels=4
    )
    x, time, labels = _normal(BATCH, 4, 32, 32), _classes(BATCH, most=1000), _classes(BATCH)
    call = lambda model: model(x, timestep=time, class_labels=labels).sample  # noqa: E731
    channels = model.config.out_channels or 4
    return Step(model, _predicted(call, _normal(BATCH, channels, 32, 32, seed=5)))


def _sd3():
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=64,
    )
    x, time = _normal(BATCH, 4, 32, 32), _classes(BATCH, most=1000)
    arguments = {
        "encoder_hidden_states": _normal(BATCH, 32, WIDTH, seed=6),
        "pooled_projections": _normal(BATCH, 64, seed=7),
        "timestep": time,
    }
    call = lambda model: model(x, **arguments).sample  # noqa: E731
    return Step(model, _predicted(call, _normal(*x.shape, seed=5)))


def _flux():
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
    )
    x, places = _normal(BATCH, 256, 16), torch.zeros(256, 3)
    places[:, 1], places[:, 2] = torch.arange(256) // 16, torch.arange(256) % 16
    arguments = {
        "encoder_hidden_states": _normal(BATCH, 32, WIDTH, seed=6),
        "pooled_projections": _normal(BATCH, 64, seed=7),
        "timestep": _normal(BATCH, seed=8).sigmoid(),
        "img_ids": places,
        "txt_ids": torch.zeros(32, 3),
    }
    call = lambda model: model(hidden_states=x, **arguments).sample  # noqa: E731
    return Step(model, _predicted(call, _normal(*x.shape, seed=5)))


_ENTRIES_OF_DIFFUSERS = (
    ("UNet2DModel", _unet),
    ("UNet2DConditionModel", _conditional_unet),
    ("AutoencoderKL", _autoencoder),
    ("DiTTransformer2DModel", _dit),
    ("SD3Transformer2DModel", _sd3),
    ("FluxTransformer2DModel", _flux),
)


# -- timm ----------------------------------------------------------------------------------------------------


class _OfTimm(NamedTuple):
    """The build of an `Entry` for a model of timm, with cross-entropy.

    Attributes:
        name: timm's name of the model.
        settings: the settings that differ from those of the name.
        size: the height and width of images.
    """

    name: str
    settings: dict
    size: int = IMAGES

    def __call__(self):
        timm = timm_models.timm_without_torchvision()
        model = timm.create_model(self.name, num_classes=CLASSES, **self.settings).train()
        batch = 8
        x, y = _normal(batch, 3, self.size, self.size), _classes(batch)
        return Step(model, lambda model: F.cross_entropy(model(x), y))


_SIZED = {"img_size": IMAGES}
_VIT = {**_SIZED, "patch_size": 8, "depth": 2}
_ENTRIES_OF_TIMM = (
    ("timm ResNet", "resnet18", {}),
    ("timm RegNet", "regnety_002", {}),
    ("timm DenseNet", "densenet121", {}),
    ("timm EfficientNet", "efficientnet_b0", {}),
    ("timm MobileNetV3", "mobilenetv3_small_100", {}),
    ("timm ConvNeXt", "convnext_atto", {}),
    ("timm ConvNeXtV2", "convnextv2_atto", {}),
    ("timm ViT", "vit_tiny_patch16_224", _VIT),
    ("timm DeiT-III", "deit3_small_patch16_224", _VIT),
    ("timm BEiT", "beit_base_patch16_224", {**_VIT, "embed_dim": 192, "num_heads": 4}),
    ("timm EVA-02", "eva02_tiny_patch14_224", _VIT),
    ("timm Swin", "swin_tiny_patch4_window7_224", {**_SIZED, "embed_dim": 48, "window_size": 4}),
    ("timm SwinV2", "swinv2_tiny_window8_256", {**_SIZED, "embed_dim": 48}),
    ("timm MLP-Mixer", "mixer_s32_224", _SIZED),
    ("timm CAFormer", "caformer_s18", {}),
    ("timm MobileViT", "mobilevit_xxs", {}),
    ("timm CoAtNet", "coatnet_pico_rw_224", _SIZED),
    ("timm FastViT", "fastvit_t8", {}),
)


def _of_timm_without_norms(name):
    """Return the build of a network without norms, whose weights are standardized in each forward.

    The channels are few and the images large, as otherwise the standardized weights would be most of what is saved.
    """

    def build():
        timm_models.timm_without_torchvision()
        from timm.models import nfnet

        settings = dataclasses.replace(
            nfnet.model_cfgs[name], depths=(1, 2, 2, 1), channels=(32, 64, 128, 192)
        )
        if settings.group_size is not None:
            settings = dataclasses.replace(settings, group_size=8)
        model = nfnet.NormFreeNet(settings, num_classes=CLASSES).train()
        x, y = _normal(8, 3, 2 * IMAGES, 2 * IMAGES), _classes(8)
        return Step(model, lambda model: F.cross_entropy(model(x), y))

    return build


# -- torch.nn ------------------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    """A language model with a recurrent layer of torch."""

    def __init__(self, cls):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = cls(WIDTH, 2 * WIDTH, 2, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0])


class _Encoder(nn.Module):
    """A language model with an encoder of torch."""

    def __init__(self, activation):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation=activation, batch_first=True
        )
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)))


class _Transformer(nn.Module):
    """A translator with torch's Transformer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x), self.embedding(x.flip(1))))


def _language_model(make):
    """Return the build of a language model whose loss is torch's cross-entropy, outside of the model."""

    def build():
        ids = _tokens()
        return Step(make(), lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))

    return build


_ENTRIES_OF_TORCH = (
    ("nn.TransformerEncoderLayer, relu", _language_model(lambda: _Encoder("relu"))),
    ("nn.TransformerEncoderLayer, gelu", _language_model(lambda: _Encoder("gelu"))),
    ("nn.Transformer", _language_model(_Transformer)),
    ("nn.LSTM", _language_model(lambda: _Recurrent(nn.LSTM))),
    ("nn.GRU", _language_model(lambda: _Recurrent(nn.GRU))),
)

ZOO = (
    *(
        Entry(name, "transformers", _OfTransformers(*rest))
        for name, *rest in _ENTRIES_OF_TRANSFORMERS
    ),
    Entry("DETR", "transformers", _detr),
    Entry("Qwen2-VL", "transformers", _qwen_vl),
    *(Entry(name, "diffusers", build) for name, build in _ENTRIES_OF_DIFFUSERS),
    *(Entry(name, "timm", _OfTimm(*rest)) for name, *rest in _ENTRIES_OF_TIMM),
    Entry("timm NFNet", "timm", _of_timm_without_norms("nfnet_l0")),
    Entry("timm NF-ResNet", "timm", _of_timm_without_norms("nf_resnet26")),
    *(Entry(name, "torch", build) for name, build in _ENTRIES_OF_TORCH),
)
"""All architectures, in the order of the table."""
