"""`lamina.from_transformers`: a Lamina model from a transformers model in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lamina.bridge.weights.memory_checkpoint import MemoryCheckpoint
from lamina.bridge.weights.share import Sharing, share_weights
from lamina.checkpoint.source import with_context
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.models import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_transformers(
    hf_model: PreTrainedModel,
    *,
    via: str | None = None,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
) -> Model:
    """A Lamina model with the weights of a transformers model, which stay where they are.

    Parameters share their memory with `hf_model`; those that Lamina stores merged or in another layout are copies.
    `model.sharing` has the bytes. The model has the same dtype and device, the text part of a multimodal model, and no
    tokenizer unless one is given. If Lamina does not have the family, the blocks of `hf_model` itself run over Lamina's
    caches (`lamina/bridge/hf_blocks/model.py`).

    via         "transformers": its own blocks, also for a family that Lamina has
    tokenizer   such as `lamina.checkpoint.open_source(path).tokenizer()`; None: for ids alone
    context     as in `lamina.load`: the longest row that will be used, for longrope and dynamic RoPE

    >>> hf_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")         # doctest: +SKIP
    >>> model = lamina.from_transformers(hf_model)                                # doctest: +SKIP
    >>> print(model.sharing)                                                      # doctest: +SKIP
    576.9 MiB shared, 560.0 MiB copied (merged 560.0 MiB)
    """
    check_model(hf_model)
    check_via(via)
    source = MemoryCheckpoint(hf_model)
    config = Config(with_context(source.config, context))
    if via is not None or not is_known(config):
        return with_its_own_blocks(hf_model, tokenizer, context)
    with torch.device("meta"):
        model = family_of(config).build(config)
    model.sharing = share_weights(model, source, hf_model.dtype, hf_model.device)
    model.tokenizer = tokenizer
    model.generation_defaults = source.generation_config
    return model.eval()


def with_its_own_blocks(hf_model: PreTrainedModel, tokenizer: Tokenizer | None, context: int | None = None) -> Model:
    """A Lamina model that calls the transformers model."""
    from lamina.bridge.hf_blocks.model import TransformersModel, checked  # which imports transformers

    if context is not None:
        raise InputError(f"context={context}: transformers' own blocks take their context from the configuration")
    if hf_model.config.is_encoder_decoder:
        raise InputError(
            f"{type(hf_model).__name__} is an encoder–decoder model of a family that Lamina does not have; of those, "
            "only decoders run with transformers' own blocks"
        )
    model = checked(TransformersModel(hf_model).eval())
    model.sharing = Sharing()
    for path, parameter in hf_model.named_parameters():
        model.sharing.add("shared", path, parameter)
    model.tokenizer = tokenizer
    return model


def is_known(config: Config) -> bool:
    """True if Lamina has the family."""
    try:
        family_of(config)
    except InputError:
        return False
    return True


def check_via(via: str | None) -> None:
    if via not in (None, "transformers"):
        raise InputError(f'via={via!r}: it must be "transformers", for its own blocks, or None')


def check_model(hf_model: Any) -> None:
    """Raises InputError for what is no transformers model with a language-model head, or is in a state that Lamina
    cannot run: training, quantized, with adapters, or over several devices."""
    name = type(hf_model).__name__
    if type(hf_model).__module__.partition(".")[0] == "peft" or getattr(hf_model, "_hf_peft_config_loaded", False):
        raise InputError(f"{name} has PEFT adapters: merge them into the weights first (merge_and_unload())")
    from transformers import PreTrainedModel

    if not isinstance(hf_model, PreTrainedModel):
        raise InputError(f"hf_model is a {name}; it must be a transformers model, such as AutoModelForCausalLM makes")
    if not hf_model.can_generate():
        raise InputError(f"{name} has no language-model head; load it with AutoModelForCausalLM or a like class")
    if getattr(hf_model, "is_quantized", False) or getattr(hf_model, "hf_quantizer", None) is not None:
        method = getattr(getattr(hf_model, "hf_quantizer", None), "quantization_config", None)
        how = getattr(method, "quant_method", "a quantizer")
        raise InputError(f"{name} has weights quantized with {getattr(how, 'value', how)!r}; dequantize() them first")
    if hf_model.training:
        raise InputError(f"{name} is in training mode, where dropout is on; call hf_model.eval() first")
    check_devices(hf_model)


def check_devices(hf_model: PreTrainedModel) -> None:
    """Raises InputError if the weights are not all on one device that has memory."""
    name, tensors = type(hf_model).__name__, list(hf_model.parameters())
    devices = sorted({str(tensor.device) for tensor in tensors} | set(map(str, mapped_devices(hf_model))))
    if "meta" in devices or "disk" in devices:
        raise InputError(f"{name} has weights without memory ({', '.join(devices)}); load it whole on one device")
    if len(devices) > 1:
        raise InputError(f"{name} is spread over {', '.join(devices)}; Lamina runs a model on one device")
    if any(hasattr(tensor, "device_mesh") for tensor in tensors):
        raise InputError(f"{name} is sharded over several processes (DTensor); Lamina runs a whole model on one device")


def mapped_devices(hf_model: PreTrainedModel) -> set[Any]:
    """The devices of `device_map=…` where it names several: hooks move weights between them."""
    found = set((getattr(hf_model, "hf_device_map", None) or {}).values())
    return found if len(found) > 1 else set()
