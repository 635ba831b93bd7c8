"""`FewbitPlugin`, with a double of Axolotl: its base class of plugins, and how it reads settings and makes a trainer.

The tests do not need Axolotl itself.
"""

import json
import sys
from types import ModuleType

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from pydantic import BaseModel, ValidationError
from trainer_runs import USUAL, llama, texts, weights
from transformers import Trainer, TrainingArguments

import fewbit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*pin_memory.*:UserWarning")  # fmt: skip
PLUGIN = "fewbit.integrations.axolotl.FewbitPlugin"
RETURN_NOTHING = """
register load_datasets pre_model_load post_model_build pre_lora_load post_lora_load post_model_load get_input_args
get_trainer_cls post_trainer_create create_optimizer create_lr_scheduler post_train post_train_unload
""".split()
RETURN_LISTS = ["add_callbacks_pre_trainer", "add_callbacks_post_trainer"]


class DictDefault(dict):
    """A dictionary of settings, as Axolotl has it: keys are attributes, and missing ones are None."""

    def __init__(self, values):
        super().__init__({name: self._of(value) for name, value in values.items()})

    @classmethod
    def _of(cls, value):
        return cls(value) if isinstance(value, dict) else value

    def __missing__(self, key):
        return None

    __getattr__ = dict.__getitem__


class InputConfig(BaseModel):
    """Axolotl's own settings."""

    learning_rate: float = 1e-2
    plugins: list[str] | None = None


@pytest.fixture
def plugin(monkeypatch):
    """Return the plugin as Axolotl makes it from the name in its YAML file."""
    base = type(
        "BasePlugin", (), {name: lambda self, *args, **kwargs: None for name in RETURN_NOTHING}
    )
    for name in RETURN_LISTS:
        setattr(base, name, lambda self, *args, **kwargs: [])
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = base
    module, cls = PLUGIN.rsplit(".", 1)
    monkeypatch.delitem(sys.modules, module, raising=False)
    made = getattr(__import__(module, fromlist=[cls]), cls)()
    yield made
    sys.modules.pop(module)


def read(plugin, text):
    """Return the settings in a file, validated by the classes of Axolotl and the plugin together."""
    module, cls = plugin.get_input_args().rsplit(".", 1)
    own = getattr(__import__(module, fromlist=[cls]), cls)
    both = type("AxolotlInputConfig", (InputConfig, own), {})
    return DictDefault(both(**json.loads(text)).model_dump(exclude_none=True))


def make_trainer(plugin, cfg, folder, model):
    """Make a trainer, with the plugin's hooks in the order in which Axolotl calls them."""
    plugin.register(cfg)
    plugin.pre_model_load(cfg)
    plugin.post_model_build(cfg, model)
    plugin.post_model_load(cfg, model)
    callbacks = plugin.add_callbacks_pre_trainer(cfg=cfg, model=model)
    saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    args = TrainingArguments(str(folder), **{**USUAL, **saves, "learning_rate": cfg.learning_rate})
    trainer = Trainer(model=model, args=args, train_dataset=texts(16), callbacks=callbacks)
    plugin.post_trainer_create(cfg, trainer)
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    return trainer


SETTINGS = """{
    "plugins": ["fewbit.integrations.axolotl.FewbitPlugin"],
    "fewbit": {
        "bits": {"kind": "adaptive", "average": 1.75, "interval": 3},
        "layers": {"attention_bits": 3},
        "overrides": {"model.layers.0.mlp": 8, "lm_head": null},
        "verbose": false
    }
}"""


@pytest.mark.slow
def test_axolotl_trains_and_resumes(plugin, tmp_path):
    cfg = read(plugin, SETTINGS)
    run = make_trainer(plugin, cfg, tmp_path, llama())
    (callback,) = (one for one in run.callback_handler.callbacks if hasattr(one, "controller"))
    assert callback.controller.config == fewbit.AdaptiveBits(1.75, interval=3)
    run.train()
    quantizer = run.model.model.layers[0].mlp.down_proj.quantizer
    assert quantizer.bits == 8 and not hasattr(run.model.lm_head, "quantizer")
    assert run.state.log_history[-2]["fewbit/saved_bytes"] > 0
    resumed = make_trainer(plugin, cfg, tmp_path, llama(seed=5))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert weights(resumed.model) == weights(run.model)


@pytest.mark.parametrize(
    ("text", "bits"), [('{"fewbit": {"bits": 2, "verbose": false}}', 2), ("{}", None)]
)
def test_the_constructor_of_the_trainer_compresses_the_model_if_the_key_is_there(
    text, bits, plugin, tmp_path
):
    model = llama()
    trainer = make_trainer(plugin, read(plugin, text), tmp_path, model)
    quantizer = getattr(model.model.layers[0].mlp.down_proj, "quantizer", None)
    assert (quantizer and quantizer.bits) == bits
    has_callback = any(hasattr(one, "controller") for one in trainer.callback_handler.callbacks)
    assert has_callback == (bits is not None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fewbit": {"bits": 9}}', "bits: expected a number from 1 to 8, got 9"),
        ('{"fewbit": {"bits": {"kind": "adaptiv"}}}', "expected a kind out of fixed"),
        ('{"fewbit": {"layers": {"group_size": 33}}}', "expected a multiple of 32"),
        ('{"fewbit": {"quantizer": "uniform"}}', "expected settings of layers in the argument layers"),
        ('{"fewbit": {"bit": 2}}', "unexpected keyword argument 'bit'"),
        ('{"fewbit": {"bits": {"kind": "budget", "bytes": "1 GiB"}}}', "budget: expected sample= too"),
    ],
)  # fmt: skip
def test_settings_are_checked_before_the_model_is_loaded(text, message, plugin):
    with pytest.raises(ValidationError) as error:
        read(plugin, text)
    assert message in str(error.value)
